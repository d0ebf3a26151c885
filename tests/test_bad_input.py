"""What the commands of the evaluation say of wrong input: a line, and nothing is made."""

import pytest
from agentsd_eval.cli import main
from agentsd_eval.errors import EvalError
from agentsd_eval.files import check_own_image, save_image
from PIL import Image

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


def test_an_image_of_the_users_is_not_written_over(tmp_path):
    photo = tmp_path / "photo.png"
    Image.new("RGB", (8, 8)).save(photo)
    for path in (photo, tmp_path / "subject.txt"):
        path.touch()
        with pytest.raises(EvalError, match="was not made by this command and stays as it is"):
            check_own_image(path)
    save_image(Image.new("RGB", (8, 8)), tmp_path / "compared.png")
    check_own_image(tmp_path / "compared.png")
    check_own_image(tmp_path / "none.png")
