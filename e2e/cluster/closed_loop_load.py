"""Users of a deployment: each asks a question, reads the whole answer, and asks the next."""

import http.client
import json
import threading
import time
from types import TracebackType
from typing import Self

TIMEOUT_S = 60
_THINKING_S = 0.15


class Load:
    """Users that go on until the context is left; `failures` says what they did not get."""

    def __init__(self, address: str, model: str, users: int = 4, tokens: int = 32) -> None:
        self._address = address
        self._question = {
            "model": model,
            "messages": [{"role": "user", "content": "What is a river?"}],
            "max_tokens": tokens,
            "stream": True,
        }
        self._over = threading.Event()
        self._users = [threading.Thread(target=self._use) for _ in range(users)]
        self.answered = 0
        self.failures: list[str] = []
        self.durations_s: list[tuple[float, float]] = []
        """Of all questions, in the order of their ends; with the Unix time of each question."""

    def __enter__(self) -> Self:
        for user in self._users:
            user.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._over.set()
        for user in self._users:
            user.join()

    def _use(self) -> None:
        while not self._over.is_set():
            began = time.time()
            fault = ask(self._address, self._question)
            self.durations_s.append((time.time() - began, began))
            if fault:
                self.failures.append(f"at {began:.1f} after {time.time() - began:.1f} s: {fault}")
                time.sleep(0.5)
            else:
                self.answered += 1
            time.sleep(_THINKING_S)


def ask(address: str, question: dict[str, object], timeout_s: float = TIMEOUT_S) -> str:
    """Ask one question on a connection of its own; what is wrong with the answer, if anything."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(question), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()
    whole = answer.status == 200 and '"error"' not in text and text.strip().endswith("data: [DONE]")
    return "" if whole else f"{answer.status} ...{text[-300:]}"
