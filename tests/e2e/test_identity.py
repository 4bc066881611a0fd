"""Greedy tokens with D3D are the plain server's, one request at a time and eight at once."""

from __future__ import annotations

import pytest

from tests.e2e.asking import Reply, RunningServer, same_reply
from tests.e2e.cases import IDENTITY, Case

pytestmark = pytest.mark.parametrize("server", ["drafter", "scripted", "ahead"], indirect=True)


@pytest.mark.parametrize("case", IDENTITY, ids=str)
def test_one_at_a_time(server: RunningServer, plain: dict[str, Reply], case: Case) -> None:
    reply = server.ask(case)
    same_reply(plain[case.name], reply)
    assert sum(reply.histogram) == reply.meta["spec_verify_ct"] > 0


def test_eight_at_once(server: RunningServer, plain: dict[str, Reply]) -> None:
    for reply in server.ask_together(IDENTITY, at_once=8):
        same_reply(plain[reply.case.name], reply)
