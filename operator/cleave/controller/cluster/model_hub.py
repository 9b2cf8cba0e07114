"""Reads config.json of models that the operator does not know from Hugging Face, or a mirror of it.

Called by the controller, which hands a deployment on with the config in place, so that a plan need
not wait until the first engine has reported the model. What cannot be read is left to that report.
What was read holds until the process ends: a plan must not change because a branch has moved, and
engines report what they load.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp

from cleave.api.model import MAX_CONFIG_LENGTH, ModelSpec
from cleave.perf.model import hf_config, model_report, model_source
from cleave.perf.model.hf_config import ModelConfigError

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Of a request; reconciles of this deployment wait for it."""
RETRY_S = 600.0
_MAX_BYTES = 4 * MAX_CONFIG_LENGTH
_MAX_MODELS = 1_000
"""Models that are kept; more would be a mistake or an attack."""
_REVISION = "main"


@dataclass(frozen=True, slots=True)
class _ReadConfig:
    config: Mapping[str, object] | None
    read_s: float


class ModelHub:
    """Keeps what was read, by model and revision. Deployments of one model share it."""

    def __init__(self, url: str, clock: Callable[[], float], token: str = "") -> None:
        """`token`: sent to this host only, for gated models; empty: none."""
        self._url, self._clock = url.rstrip("/"), clock
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._configs: dict[tuple[str, str], _ReadConfig] = {}

    async def read_config(self, model: ModelSpec) -> Mapping[str, object] | None:
        """The fields of the model's config.json that plans read; None: there are none now."""
        key = model.locator, model.revision or _REVISION
        known = self._configs.get(key)
        if known and (known.config is not None or self._clock() - known.read_s < RETRY_S):
            return known.config
        config = None
        try:
            config = _select(model, await self._get_text(*key))
        except (aiohttp.ClientError, OSError, UnicodeDecodeError, ModelConfigError) as error:
            why = str(error) or type(error).__name__
            log.warning("config.json of %s is not read from %s: %s", key[0], self._url, why)
        if len(self._configs) >= _MAX_MODELS:
            self._configs.pop(next(iter(self._configs)))
        self._configs[key] = _ReadConfig(config, self._clock())
        return config

    async def _get_text(self, locator: str, revision: str) -> str:
        """Raises ClientError, OSError, UnicodeDecodeError or ModelConfigError."""
        url = f"{self._url}/{locator}/resolve/{quote(revision, safe='')}/config.json"
        timeout = aiohttp.ClientTimeout(TIMEOUT_S)
        # A redirect to another host goes without the token.
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
            session.get(url, headers=self._headers, max_redirects=3) as response,
        ):
            if not response.ok:
                raise ModelConfigError(f"it answers {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise ModelConfigError(f"it is longer than {_MAX_BYTES:,} bytes")
        return body.decode()


def _select(model: ModelSpec, text: str) -> Mapping[str, object]:
    """The fields that plans read. Raises ModelConfigError where they are not usable."""
    config = hf_config.decode_config(text)
    if not isinstance(config, Mapping):
        raise ModelConfigError("it holds no object")
    selected = model_report.select_config(config)
    model_source.with_report(model, selected)
    return selected
