"""Measured iterations: vLLM serving Llama-2-70B and BLOOM-176B on A100-80G and H100-80G SXM.

Profiles for tests and benchmarks; plans use no engine of 2023. The numbers are facts published with
Splitwise (Patel et al., ISCA'24, section V-B): github.com/Mutinifni/splitwise-sim at 8f99e7d (MIT),
data/perf_model.csv; here the medians of five repeats or more. Excluded: its rows of power-capped
H100s, whose decode is the H100's and whose prefill is exactly 1.30 times the H100's (derived, not
measured), and batches of 64 at a tensor parallel size of 2, which did not fit and took less time
than batches of 32.
"""

from typing import NamedTuple

from cleave.perf.profile.profile import DecodePoint, MeasuredProfile, PrefillPoint

_PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)
_OUTPUT = 128
_BATCH_PROMPT = 512
_LONG_OUTPUTS = (256, 512, 1024, 2048, 4096, 8192)
_BATCHES = (2, 4, 8, 16, 32, 64)


class _PublishedRun(NamedTuple):
    prompt_ms: tuple[float, ...]
    """Prefill of one prompt, for each length of _PROMPTS."""
    batch_prompt_ms: tuple[float, ...]
    """Prefill of _BATCHES prompts with 512 tokens each."""
    token_ms: tuple[float, ...]
    """Mean decode iteration after those prompts, with 128 tokens of output."""
    long_token_ms: tuple[float, ...]
    """The same after 512 tokens of prompt, for _LONG_OUTPUTS."""
    batch_token_ms: tuple[float, ...]
    """The same for _BATCHES, 128 tokens of output each."""


_RUNS: dict[tuple[str, str, int], _PublishedRun] = {
    ("bloom", "A100-SXM-80GB", 8): _PublishedRun(
        prompt_ms=(79.67, 99.16, 173.81, 289.19, 540.41, 1348.17, 3593.17),
        batch_prompt_ms=(286.83, 528.63, 1322.18, 3510.13, 5782.0, 11251.83),
        token_ms=(47.61, 47.71, 48.76, 48.8, 49.36, 50.2, 51.3),
        long_token_ms=(49.01, 49.31, 50.52, 50.01, 50.35, 50.35),
        batch_token_ms=(49.99, 51.0, 52.95, 57.34, 65.38, 96.58),
    ),
    ("bloom", "H100-SXM-80GB", 8): _PublishedRun(
        prompt_ms=(48.28, 51.18, 75.49, 132.62, 253.11, 688.7, 1535.4),
        batch_prompt_ms=(131.25, 238.83, 625.01, 1313.26, 2521.91, 4996.45),
        token_ms=(35.74, 36.15, 36.11, 35.48, 35.72, 36.94, 37.44),
        long_token_ms=(36.66, 36.91, 36.68, 35.57, 36.19, 36.12),
        batch_token_ms=(36.91, 38.06, 38.14, 40.64, 45.84, 63.82),
    ),
    ("llama-2-70b", "A100-SXM-80GB", 2): _PublishedRun(
        prompt_ms=(81.08, 112.93, 196.86, 377.06, 688.05, 1485.35, 2990.18),
        batch_prompt_ms=(416.49, 845.37, 1596.83, 3238.85, 6632.63),
        token_ms=(53.68, 54.1, 54.86, 54.77, 54.89, 55.87, 57.32),
        long_token_ms=(60.02, 59.95, 59.7, 60.35, 60.27, 60.21),
        batch_token_ms=(59.92, 60.52, 61.69, 65.46, 72.19),
    ),
    ("llama-2-70b", "A100-SXM-80GB", 4): _PublishedRun(
        prompt_ms=(63.65, 78.57, 126.96, 227.08, 403.33, 965.15, 2278.45),
        batch_prompt_ms=(253.93, 571.43, 1233.02, 2892.58, 5131.73, 10947.82),
        token_ms=(42.42, 42.18, 44.99, 44.95, 44.98, 46.37, 46.06),
        long_token_ms=(44.51, 44.48, 44.37, 44.5, 43.34, 44.78),
        batch_token_ms=(45.0, 45.09, 45.8, 48.52, 52.35, 72.95),
    ),
    ("llama-2-70b", "A100-SXM-80GB", 8): _PublishedRun(
        prompt_ms=(65.35, 66.76, 94.31, 154.46, 274.22, 661.22, 1549.82),
        batch_prompt_ms=(165.94, 292.28, 767.62, 2084.41, 3524.54, 7553.99),
        token_ms=(43.03, 43.48, 44.85, 44.97, 45.44, 46.48, 46.51),
        long_token_ms=(45.9, 44.99, 44.76, 45.35, 45.98, 45.03),
        batch_token_ms=(44.56, 45.79, 46.47, 50.44, 53.02, 71.61),
    ),
    ("llama-2-70b", "H100-SXM-80GB", 2): _PublishedRun(
        prompt_ms=(48.33, 51.85, 83.83, 157.95, 310.32, 642.66, 1339.84),
        batch_prompt_ms=(155.84, 299.82, 606.02, 1191.98, 2397.77),
        token_ms=(37.24, 37.84, 37.0, 37.39, 37.37, 37.54, 37.8),
        long_token_ms=(37.23, 37.35, 37.07, 36.88, 37.29, 37.46),
        batch_token_ms=(37.39, 39.98, 40.4, 41.97, 52.3),
    ),
    ("llama-2-70b", "H100-SXM-80GB", 4): _PublishedRun(
        prompt_ms=(49.09, 50.98, 59.62, 105.61, 200.68, 463.46, 953.58),
        batch_prompt_ms=(103.62, 195.28, 442.2, 874.35, 1726.05, 3520.47),
        token_ms=(28.36, 30.03, 29.72, 29.44, 29.82, 29.58, 29.72),
        long_token_ms=(28.4, 29.32, 29.33, 29.33, 29.77, 29.38),
        batch_token_ms=(29.98, 29.92, 31.44, 32.84, 36.88, 52.36),
    ),
    ("llama-2-70b", "H100-SXM-80GB", 8): _PublishedRun(
        prompt_ms=(58.19, 51.66, 53.39, 77.91, 136.8, 390.29, 844.89),
        batch_prompt_ms=(76.89, 132.64, 371.63, 811.93, 1551.73, 2936.33),
        token_ms=(29.87, 28.27, 29.76, 29.74, 31.05, 30.56, 31.41),
        long_token_ms=(31.51, 30.66, 31.86, 30.76, 30.56, 30.81),
        batch_token_ms=(30.26, 31.79, 32.5, 34.17, 38.62, 50.16),
    ),
}


def list_profiles() -> tuple[tuple[str, str, int], ...]:
    """(model, GPU, tensor parallel size) of every profile."""
    return tuple(_RUNS)


def find_profile(model: str, gpu: str, tensor_parallel_size: int) -> MeasuredProfile | None:
    """The measured profile, with names as in the catalogues; None: not measured."""
    run = _RUNS.get((model, gpu, tensor_parallel_size))
    if run is None:
        return None
    singles = zip(_PROMPTS, run.prompt_ms, strict=True)
    batches = zip(_BATCHES, run.batch_prompt_ms, strict=False)
    prefill = [PrefillPoint(tokens=tokens, ms=ms) for tokens, ms in singles]
    prefill += [PrefillPoint(prompts=n, tokens=_BATCH_PROMPT, ms=ms) for n, ms in batches]
    return MeasuredProfile(
        model=model,
        device=gpu,
        engine="vllm",
        measured_at="2023 (Splitwise, ISCA'24)",
        tensor_parallel_size=tensor_parallel_size,
        prefill=tuple(prefill),
        decode=tuple(sorted(_build_decode_points(run), key=lambda point: point.key)),
    )


def _build_decode_points(run: _PublishedRun) -> list[DecodePoint]:
    """Decode points; the context of a mean iteration is taken from the middle of the output."""
    middle = _OUTPUT // 2
    points = [(1, n + middle, ms) for n, ms in zip(_PROMPTS, run.token_ms, strict=True)]
    long_outputs = zip(_LONG_OUTPUTS, run.long_token_ms, strict=True)
    points += [(1, _BATCH_PROMPT + n // 2, ms) for n, ms in long_outputs]
    batches = zip(_BATCHES, run.batch_token_ms, strict=False)
    points += [(n, n * (_BATCH_PROMPT + middle), ms) for n, ms in batches]
    return [DecodePoint(batch=batch, context_tokens=n, ms=ms) for batch, n, ms in points]
