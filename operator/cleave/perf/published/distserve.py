"""Measured coefficients: DistServe and vLLM serving OPT-13B and OPT-66B on A100-80G SXM.

Read by cleave.perf.named_profiles. The numbers are facts published with DistServe (Zhong et al.,
OSDI'24): github.com/LLMServe/DistServe at 82831f1 (Apache-2.0),
simdistserve/estimators/profile_data, profiler-a100-80g.{distserve,vllm}.json and
max_num_tokens.csv. The coefficients are unchanged.
"""

from typing import NamedTuple


class AffineFit(NamedTuple):
    """ms = fixed_ms + per_token_ms * sum of lengths + regressor_ms * `PublishedFit`'s regressor."""

    fixed_ms: float
    per_token_ms: float
    regressor_ms: float


class PublishedFit(NamedTuple):
    """One engine, model and tensor parallelism; `regressor_ms` is per token^2 or per request."""

    prefill: AffineFit
    """Regressor: sum of squared prompt lengths."""
    decode_small: AffineFit
    """Regressor: requests in the batch; for batches below LARGE_BATCH_FROM."""
    decode_large: AffineFit
    """The same for batches from LARGE_BATCH_FROM on."""


LARGE_BATCH_FROM = 95
"""Batch size at which the decode fit changes."""

_PREFILL = {
    "distserve/opt-13b/tp1": (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
    "distserve/opt-13b/tp2": (14.742973695171262, 0.06857720739764, 2.4495727400243586e-06),
    "distserve/opt-13b/tp4": (12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
    "distserve/opt-66b/tp2": (43.05881348288936, 0.2742292870458432, 2.2478042467169447e-05),
    "distserve/opt-66b/tp3": (32.998230028437035, 0.19568256864690514, 1.2205248980953765e-05),
    "distserve/opt-66b/tp4": (29.441636037717455, 0.151352180625198, 8.317450765979451e-06),
    "distserve/opt-66b/tp8": (25.490662375045222, 0.10659177664763161, 3.3910502518615973e-06),
    "vllm/opt-13b/tp1": (22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
    "vllm/opt-13b/tp2": (27.440806247810684, 0.0905453268062731, 8.452054313246025e-06),
    "vllm/opt-13b/tp4": (30.536322590049405, 0.05150644936810146, 4.232473132942393e-07),
    "vllm/opt-66b/tp2": (58.3822026348141, 0.3826408030281867, -7.1141486747694485e-06),
    "vllm/opt-66b/tp3": (45.74453423698261, 0.2778127747865773, 3.64624693008797e-05),
    "vllm/opt-66b/tp4": (42.965489361973944, 0.2128658422785494, 4.601017396226869e-05),
    "vllm/opt-66b/tp8": (38.931193445523604, 0.1573682229779579, 4.531676245669589e-06),
}
_DECODE_SMALL = {
    "distserve/opt-13b/tp1": (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
    "distserve/opt-13b/tp2": (13.294796350285385, 0.00034109219700723494, 0.06296393225243659),
    "distserve/opt-13b/tp4": (10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
    "distserve/opt-66b/tp2": (48.288015489286245, 0.0009424343535737985, 0.12755020094383188),
    "distserve/opt-66b/tp3": (35.8015439512012, 0.0005845004786127403, 0.0952669764890301),
    "distserve/opt-66b/tp4": (30.760284619429587, 0.000451947603788462, 0.063284195750671),
    "distserve/opt-66b/tp8": (23.15511135047022, 0.00022691488497826264, 0.04800638397272423),
    "vllm/opt-13b/tp1": (23.475041008414784, 0.000592934466077393, 0.060726861260369455),
    "vllm/opt-13b/tp2": (24.54058424191086, 0.00022440145424035404, 0.08715787269447899),
    "vllm/opt-13b/tp4": (25.90114444283343, 7.753634454230709e-05, 0.05528087160867803),
    "vllm/opt-66b/tp2": (57.07344137197128, 0.0036461138777547255, 0.2249373634499222),
    "vllm/opt-66b/tp3": (44.93958620555262, 0.0008096152552620141, 0.21287979591036174),
    "vllm/opt-66b/tp4": (39.58178936012414, 0.0006945721692406896, 0.13580868185596764),
    "vllm/opt-66b/tp8": (31.176041922273107, 0.00027556543631760213, 0.0679770397053775),
}
_DECODE_LARGE = {
    "distserve/opt-13b/tp1": (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
    "distserve/opt-13b/tp2": (10.638741913126715, 0.00031183369638295723, 0.08562913604102729),
    "distserve/opt-13b/tp4": (10.483514938375274, 0.00017120888562939117, 0.04566648525887034),
    "distserve/opt-66b/tp2": (28.727693993711597, 0.00047448475459061987, 0.29617792360743994),
    "distserve/opt-66b/tp3": (22.653861586978355, 0.0005358489190129727, 0.208514444037787),
    "distserve/opt-66b/tp4": (27.47082137429487, 0.0004046845541646486, 0.12480667738300383),
    "distserve/opt-66b/tp8": (21.71772781576609, 0.0003758089655762475, 0.08978614175851013),
    "vllm/opt-13b/tp1": (20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
    "vllm/opt-13b/tp2": (17.947769467112806, 0.0004570851465217072, 0.11179075830699213),
    "vllm/opt-13b/tp4": (23.88388468859458, 0.00028400164093310935, 0.06276523831046728),
    "vllm/opt-66b/tp2": (26.983759428854572, 0.006200132376379982, 0.4482569479277445),
    "vllm/opt-66b/tp3": (43.69602916834496, 0.0008402567346080152, 0.24006467608312998),
    "vllm/opt-66b/tp4": (40.859718006896806, 0.0004264871259058686, 0.19508372547790553),
    "vllm/opt-66b/tp8": (29.087774405517447, 0.0006027720257746419, 0.1389608688300688),
}
FITS: dict[str, PublishedFit] = {
    name: PublishedFit(
        AffineFit(*fit), AffineFit(*_DECODE_SMALL[name]), AffineFit(*_DECODE_LARGE[name])
    )
    for name, fit in _PREFILL.items()
}
"""By engine, model and tensor parallelism; the three tables hold fields of `AffineFit`."""

_KV_STAGES = {"opt-13b": (1, 2, 4, 5, 8), "opt-66b": (1, 2, 4, 8), "opt-175b": (1, 2, 3, 4, 6, 8)}
"""The pipeline sizes of the columns of `_KV_ROWS`."""
_KV_ROWS: dict[str, dict[int, tuple[int, ...]]] = {
    "opt-13b": {
        1: (66144, 163008, 356752, 453616, 744224),
        2: (163008, 356752, 744224, 937968, 1519184),
        4: (356736, 744224, 1519168, 1906656, 3069088),
        5: (453600, 937952, 1906640, 2390992, 3844032),
        8: (744208, 1519168, 3069072, 3844032, 6168896),
    },
    "opt-66b": {
        1: (11600, 78512, 212320),
        2: (11600, 78512, 212320, 479952),
        3: (45056, 145408, 346128, 747568),
        4: (78496, 212320, 479936, 1015200),
        6: (145408, 346128, 747568, 1550448),
        8: (212304, 479936, 1015184, 2085696),
    },
    "opt-175b": {
        1: (26208, 59536),
        2: (26208, 59536, 126160, 192800),
        3: (26208, 76192, 126160, 226112, 326064),
        4: (59520, 126160, 192800, 326064, 459328),
        6: (26208, 126160, 226112, 326064, 525968, 725872),
        8: (59520, 192784, 326048, 459328, 725856, 992400),
    },
}
"""Rows by tensor parallelism; the last columns of `_KV_STAGES`, as the model needs the GPUs."""
KV_CAPACITY_TOKENS = {
    model: {
        (tensor, pipeline): tokens
        for tensor, row in rows.items()
        for pipeline, tokens in zip(_KV_STAGES[model][-len(row) :], row, strict=True)
    }
    for model, rows in _KV_ROWS.items()
}
"""Model -> (tensor parallelism, pipeline parallelism) -> tokens of KV that one instance holds."""
