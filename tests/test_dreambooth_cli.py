"""What the command of DreamBooth says of settings that it refuses."""

import pytest
import typer
from typer.testing import CliRunner

from agentsd.dreambooth.cli import dreambooth

BAD = [
    (["--instance_data_dir", "nowhere"], "nowhere is not a folder"),
    (["--instance_data_dir", "BROKEN"], "broken.png cannot be read"),
    (["--resolution", "33"], "resolution=33"),
    (["--scale", "0.54"], "scale=0.54"),
    (["--with_prior_preservation"], "needs class_data_dir"),
    (["--resume_from_checkpoint", "checkpoint-7"], "there: none"),
    (["--lora_rank", "4", "--train_text_encoder"], "leave out train_text_encoder"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_is_said_before_anything_is_loaded(options, message, photographs, tmp_path):
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN" / "broken.png").write_bytes(b"no image")
    options = [str(tmp_path / o) if (tmp_path / o).exists() else o for o in options]
    base = ["--pretrained_model_name_or_path", "no/model", "--instance_prompt", "a sks cat"]
    base += ["--instance_data_dir", str(photographs), "--output_dir", str(tmp_path / "out")]
    assert message in told_by(base + options)


def told_by(options):
    """What the command says of input it refuses."""
    app = typer.Typer()
    app.command()(dreambooth)
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    return result.output


def test_resuming_from_an_earlier_checkpoint_overwrites_no_later_one(photographs, tmp_path):
    for step in (20, 100, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
    base = ["--pretrained_model_name_or_path", "no/model", "--instance_prompt", "a sks cat"]
    base += ["--instance_data_dir", str(photographs), "--output_dir", str(tmp_path)]
    told = told_by([*base, "--resume_from_checkpoint", "checkpoint-20"])
    assert "'checkpoint-20': the run would overwrite checkpoint-100 in" in told
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3


MISSING = (
    "--pretrained_model_name_or_path, --instance_data_dir, --instance_prompt missing: give each as an option"
)
BOMB = "a: &a [1, 1]\nb: [*a, *a]\n"


def test_what_is_missing_is_told_as_options():
    assert told_by([]) == f"error: {MISSING}, or as lines of a YAML file, with --config\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ratio: [1\n", "is not valid YAML: line 2, column 1: expected ',' or ']'"),
        (b"- ratio\n", "holds a list: write `name: value` lines"),
        (b"", f"error: {MISSING}, or as lines of FILE\n"),
        (b"ratio: \xff\n", "FILE is not UTF-8 text (byte 7): save it as UTF-8"),
        (
            BOMB.encode(),
            "FILE is not valid YAML: line 2, column 5: aliases (*name) are not read: write it out",
        ),
        (b"[" * 5000, "FILE is nested too deeply"),
        (b"#" * 1_000_001, "FILE is larger than 1,000,000 bytes"),
        (b"ratio: x\n", "FILE: ratio='x': Input should be a valid number"),
        (b"max_steps: 3\n", "FILE: max_steps: there is no such setting; --help lists them"),
        (None, "error: FILE: No such file or directory\n"),
    ],
)
def test_a_bad_file_of_settings_is_told_in_a_line(content, message, tmp_path):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    printed = told_by(["--config", str(path)]).replace(str(path), "FILE")
    assert message in printed
    assert "run.yaml" not in printed.replace("FILE", "")
    assert all(line.startswith("error: ") for line in printed.splitlines())
    assert len(printed) < 500
