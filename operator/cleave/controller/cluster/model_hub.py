"""Reads config.json of models that the operator does not know from Hugging Face, or a mirror of it.

Called by the controller, which hands a deployment on with the config in place, so that a plan need
not wait until the first engine has reported the model. Reads run beside the reconciles, which wait
for none: a hub that does not answer must not hold up other deployments. What was read holds until
the process ends: a plan must not change because a branch has moved, and engines report what they
load.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

import httpx

from cleave.api.model import MAX_CONFIG_LENGTH, ModelSpec
from cleave.perf.model import config_parts, hf_config, model_report, model_source
from cleave.perf.model.hf_config import ModelConfigError

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
RETRY_S = 120.0
_MAX_BYTES = 4 * MAX_CONFIG_LENGTH
_MAX_MODELS = 1_000
"""Models that are kept; more would be a mistake or an attack."""
_MAX_READS = 4
"""Reads at a time."""
_REVISION = "main"
_FAULTS = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ModelConfigError)


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """What a read has found."""

    read_s: float
    config: Mapping[str, object] | None = None
    """The fields of the config.json that plans read; None: there are none now."""
    fault: str = ""
    """Why there are none."""


class ModelHub:
    """Keeps what was read, by model and revision. Deployments of one model share it."""

    def __init__(self, url: str, clock: Callable[[], float], token: str = "") -> None:
        """`token`: sent to this host only, for gated models; empty: none."""
        self.url = url.rstrip("/")
        self._clock, token = clock, token.strip()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = ssl.create_default_context()
        self._answers: dict[tuple[str, str], HubAnswer] = {}
        self._reads: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._waiting: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._slots = asyncio.Semaphore(_MAX_READS)

    def find(self, model: ModelSpec, on_read: Callable[[], None]) -> HubAnswer | None:
        """What the hub has about a model; None: it was not read yet. Where so, or the time for
        another try, is the case, a read begins, and `on_read` is called at its end."""
        key = model.locator, model.revision or _REVISION
        known = self._answers.get(key)
        if known is None or (known.config is None and self._clock() - known.read_s >= RETRY_S):
            self._waiting.setdefault(key, []).append(on_read)
            if key not in self._reads:
                self._reads[key] = asyncio.create_task(self._read(key, model))
        return known

    async def _read(self, key: tuple[str, str], model: ModelSpec) -> None:
        before = self._answers.get(key)
        async with self._slots:
            try:
                answer = HubAnswer(self._clock(), await self._read_config(key, model))
            except _FAULTS as error:
                answer = HubAnswer(self._clock(), fault=str(error) or type(error).__name__)
                if before is None or before.fault != answer.fault:
                    log.warning("config.json of %s on %s: %s", key[0], self.url, answer.fault)
        self._answers.pop(key, None)
        if len(self._answers) >= _MAX_MODELS:
            self._answers.pop(next(iter(self._answers)))
        self._answers[key] = answer
        del self._reads[key]
        for on_read in self._waiting.pop(key, ()):
            on_read()

    async def _read_config(self, key: tuple[str, str], model: ModelSpec) -> Mapping[str, object]:
        """The fields that plans read. Raises HTTPError, OSError, ValueError or ModelConfigError,
        also where they are not usable."""
        config = await self._get_object(*key, "config.json")
        if config is None:
            raise ModelConfigError("it answers 404")
        if not config.get("quantization_config"):
            beside = await self._get_object(*key, config_parts.QUANTIZATION_FILE)
            config = config_parts.with_quantization(config, beside)
        selected = model_report.select_config(config)
        model_source.with_config(model, selected)
        return selected

    async def _get_object(
        self, locator: str, revision: str, file: str
    ) -> Mapping[str, object] | None:
        """A file of JSON; None: the model has no such file. Raises HTTPError, OSError, ValueError
        or ModelConfigError."""
        url = f"{self.url}/{locator}/resolve/{quote(revision, safe='')}/{file}"
        body = bytearray()
        # A redirect to another host goes without the token.
        async with (
            asyncio.timeout(TIMEOUT_S),
            httpx.AsyncClient(
                verify=self._tls, timeout=TIMEOUT_S, follow_redirects=True, max_redirects=3
            ) as client,
            client.stream("GET", url, headers=self._headers) as response,
        ):
            if response.status_code == HTTPStatus.NOT_FOUND:
                return None
            if not response.is_success:
                raise ModelConfigError(f"it answers {response.status_code}")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise ModelConfigError(f"it is longer than {_MAX_BYTES:,} bytes")
        decoded = hf_config.decode_config(body.decode())
        if not isinstance(decoded, Mapping):
            raise ModelConfigError("it holds no object")
        return decoded
