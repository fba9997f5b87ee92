"""The bar of the commands that make token files counts tokens a second behind the first batch, which compiles."""

from __future__ import annotations

import pytest

from specjax.commands.token_data import token_progress


def test_the_rate_leaves_out_the_first_batch_if_there_are_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    times = iter([0.0, 10.0, 12.0, 14.0])
    monkeypatch.setattr("specjax.commands.token_data.time.perf_counter", lambda: next(times))
    with token_progress("Sampling", total=3, shown=False) as update:
        rates = [update(index + 1, tokens) for index, tokens in enumerate([50, 40, 20])]
    assert rates == [5.0, 20.0, 15.0]
    assert capsys.readouterr().err == ""
