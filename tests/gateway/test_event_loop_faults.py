"""Faults in callbacks: one line, once a minute for each place, without what a client has sent."""

import asyncio

import httptools
import pytest

from cleave.gateway.event_loop_faults import MAX_PLACES, EventLoopFaults
from cleave.gateway.http.request_parser import RequestParser

SECRET = "sk-secret-of-a-client"


def fail() -> Exception:
    try:
        int(SECRET)
    except ValueError as error:
        return error
    raise AssertionError


async def test_a_fault_is_one_line_a_minute_for_each_place(clock, caplog) -> None:
    faults, loop = EventLoopFaults(clock), asyncio.get_running_loop()
    for _ in range(1_000):
        faults.handle(loop, {"exception": fail()})
    clock.now_s += 61
    faults.handle(loop, {"exception": fail()})
    faults.handle(loop, {"message": "a socket is left"})
    lines = [record.getMessage() for record in caplog.records]
    place = "ValueError < test_event_loop_faults.py:"
    assert [place in line for line in lines] == [True, True, False]
    assert "(999 more since it was logged last)" in lines[1]
    assert "a socket is left" in lines[2]
    assert SECRET not in caplog.text
    assert "Traceback" not in caplog.text


async def test_few_places_are_remembered(clock) -> None:
    faults = EventLoopFaults(clock)
    for number in range(10 * MAX_PLACES):
        faults.handle(asyncio.get_running_loop(), {"message": str(number)})
    assert len(faults._logged) <= MAX_PLACES


@pytest.mark.interpreted
async def test_a_fault_in_the_parser_is_reported_and_the_client_answered(
    single, monkeypatch, caplog
) -> None:
    def fail_at_head(self) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr(RequestParser, "on_headers_complete", fail_at_head)
    for _ in range(3):
        assert (await single.ask(None, "/health")).status == 400
    (record,) = caplog.records
    assert "HttpParserCallbackError" in record.getMessage()
    assert "ValueError < test_event_loop_faults.py" in record.getMessage()
    assert SECRET not in caplog.text


async def test_a_fault_of_a_connection_is_one_line(single, monkeypatch, caplog) -> None:
    monkeypatch.setattr(httptools, "HttpParserError", ())
    client = await single.connect()
    client.writer.write(b"\0")
    assert await client.is_closed()
    (record,) = caplog.records
    assert "client_connection.py" in record.getMessage()
