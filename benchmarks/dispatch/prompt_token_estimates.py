"""How well the gateway estimates the tokens of a prompt, compared with real tokenizers.

    python benchmarks/dispatch/prompt_token_estimates.py

Texts are what this machine has: Python's library (code), packages' descriptions (prose), JSON files
of packages, and the message catalogues of Debian's programs in many languages. Tokenizers come with
mistral-common, which vLLM brings along: Tekken (131,000 tokens) and SentencePiece (32,000).
"""

import gettext
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import mistral_common
import numpy as np
from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from rich.console import Console
from rich.table import Table

from cleave.gateway.http.token_estimate import BYTES_PER_TOKEN, estimate_tokens
from cleave.time_slices import run_at_once

LANGUAGES = [
    "de",
    "fr",
    "es",
    "pl",
    "pt_BR",
    "tr",
    "vi",
    "ru",
    "uk",
    "el",
    "he",
    "ar",
    "hi",
    "th",
    "ja",
    "ko",
    "zh_CN",
]
SAMPLES = 60
"""Of each kind of text."""
LEAST_CHARACTERS = 200
SEED = 1

Way = Callable[[bytes], float]
WAYS: dict[str, Way] = {
    "bytes / 4": lambda text: len(text) / BYTES_PER_TOKEN,
    "estimate": lambda text: float(run_at_once(estimate_tokens(text))),
}


def read_texts() -> Iterator[tuple[str, list[str]]]:
    """Each kind and long texts of it."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    files = {
        "code": [path for path in library.rglob("*.py") if path.parent.name != "encodings"],
        "prose": [*packages.glob("*.dist-info/METADATA")],
        "JSON": [*packages.rglob("*.json")],
    }
    for kind, paths in files.items():
        fitting = [path for path in paths if 2_000 < path.stat().st_size < 2_000_000]
        chosen = random.sample(sorted(fitting), min(SAMPLES, len(fitting)))
        yield kind, [path.read_text(errors="ignore") for path in chosen]
    for language in LANGUAGES:
        said: list[str] = []
        for path in Path("/usr/share/locale", language).rglob("*.mo"):
            try:
                with path.open("rb") as file:
                    said += gettext.GNUTranslations(file)._catalog.values()  # type: ignore[attr-defined]
            except (OSError, UnicodeDecodeError):
                continue
        whole = "\n".join(text for text in said if isinstance(text, str) and len(text) > 15)
        if len(whole) > 20_000:
            yield language, [whole] * SAMPLES


def cut(text: str) -> str:
    """A piece of it, as long as prompts are."""
    length = min(len(text), LEAST_CHARACTERS + int(random.lognormvariate(7.5, 1.0)))
    start = random.randrange(len(text) - length + 1)
    return text[start : start + length]


def write(text: str, escaped: bool) -> bytes:
    """As it stands in a request."""
    return json.dumps([{"role": "user", "content": text}], ensure_ascii=escaped).encode()


def main() -> int:
    random.seed(SEED)
    data = Path(mistral_common.__file__).parent / "data"
    tekken = Tekkenizer.from_file(str(data / "tekken_240911.json"))
    pieces = SentencePieceTokenizer(
        str(data / "mistral_instruct_tokenizer_240323.model.v3")  # The newest of 32,000.
    )
    tokenizers = {"131,000": tekken, "32,000": pieces}
    errors: dict[tuple[str, str, bool], list[tuple[str, float]]] = {}
    for kind, texts in read_texts():
        for text in map(cut, texts):
            for vocabulary, tokenizer in tokenizers.items():
                tokens = len(tokenizer.encode(text, bos=False, eos=False))
                for escaped in (False, True):
                    body = write(text, escaped)
                    for name, way in WAYS.items():
                        error = float(np.log(way(body) / tokens))
                        errors.setdefault((vocabulary, name, escaped), []).append((kind, error))
    print_table(errors)
    return 0


def print_table(errors: dict[tuple[str, str, bool], list[tuple[str, float]]]) -> None:
    """Spread over all texts, which a scale learnt by instances' lines does not mend, and means."""
    table = Table(title="log(estimate / tokens)", title_justify="left")
    heads = ("vocabulary", "way", "JSON", "spread", "code", "prose", "JSON files", "languages")
    for head in heads:
        table.add_column(head, justify="right")
    for (vocabulary, name, escaped), found in errors.items():
        means = [
            np.mean(
                [error for kind, error in found if (kind if kind in known else "") == prompt_kind]
            )
            for known in [("code", "prose", "JSON")]
            for prompt_kind in ("code", "prose", "JSON", "")
        ]
        spread = np.std([error for _, error in found])
        table.add_row(
            vocabulary,
            name,
            "escaped" if escaped else "UTF-8",
            f"{spread:.2f}",
            *(f"{mean:+.2f}" for mean in means),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
