"""What the commands of the evaluation say of wrong input: a line, and nothing is made."""

import pytest
from agentsd_eval.cli import main

TABLE = [
    (["compare", "--methods", "tomesdd"], "tomesdd"),
    (["compare", "--ratio", "1.5"], "1.5"),
    (["compare", "--model", "/nowhere/model"], "nowhere"),
    (["latency", "--sizes", "100"], "100"),
    (["table", "--config", "nowhere.yaml"], "nowhere.yaml"),
    (["report", "nowhere"], "nowhere"),
]


@pytest.mark.parametrize(("words", "message"), TABLE)
def test_bad_input(words, message, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["agentsd-eval", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code not in (0, None)
    said = " ".join("".join(capfd.readouterr()).split())
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("*.png"))
