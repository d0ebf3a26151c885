"""What is wrong ends a command with one message, before any long work."""

import re
import subprocess
import sys

import pytest
import torch
from agentsd_eval.errors import shortened
from commands import invoke, run


def test_an_error_stands_alone(tmp_path):
    """transformers would advise to install torchvision, which breaks a CPU build of torch."""
    words = ["table", "--reference", tmp_path, "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "agentsd_eval.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .* holds 0 images .*\n", done.stderr)


REFUSED = (
    "table --methods agentsdd",
    "compare --methods fast/unipc",
    "table --model ./nofolder",
    "check --scheduler unipck",
    "table --config nope",
    "table --reference /nowhere",
    "table --reference empty",
    "compare --out /dev/null/x.png",
    "table --device gpu",
    "table --clip /nowhere",
    "compare --steps 0",
    "check --device toaster!",
    "fid /nowhere /nowhere",
)


def test_wrong_words_are_refused_before_torch_is_loaded(tmp_path):
    """Loading torch and diffusers takes seconds. OpenMP is told before that its threads should not spin."""
    code = """
import os, sys
from agentsd_eval.cli import main
for words in sys.argv[1:]:
    try:
        main(words.split(), standalone_mode=False)
    except SystemExit as ended:
        assert ended.code == 2, (words, ended.code)
    else:
        raise AssertionError(words)
    assert "torch" not in sys.modules, words
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
"""
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-c", code, *REFUSED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == done.stderr.count("error: ") == len(REFUSED) + 1  # of two folders


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare --device cuda:77", "--device = cuda:77: this machine has no CUDA device; use cpu"),
        ("compare --device toaster", "--device = toaster: pass cpu, cuda, cuda:1 or mps"),
        ("check --dtype fp16", "--dtype = fp16: did you mean float16? choose float32, float16 or"),
        ("check --offload model", "--offload = model: this machine has no GPU whose memory it would"),
        ("check --model gone.safetensors", "--model = gone.safetensors: there is no such file"),
        ("table --steps many", "--steps = many: pass a whole number"),
        ("table --ratios 0.9", "error: --ratios = 0.9: pass 0.75 or less"),
        ("compare --ratio 1.5", "--ratio = 1.5"),
        ("latency --sizes 100", "--sizes = 100"),
        ("table --stepz 3", "error: no such option '--stepz'"),
        ("report /no/such", "folder = '/no/such': there is no such folder"),
        ("report", "error: missing argument 'FOLDER' (see "),
        ("fid a b c", " extra argument (c) (see "),
        ("tabel", "error: no such command 'tabel'. Did you mean 'table'? (see "),
        ("latency --arch sd15 --model demo", "--arch and --model exclude each other: give one"),
        (
            "check --methods baseline,baseline@9",
            "--methods = baseline,baseline@9: name one that isn't",
        ),
        ("compare --config table10", "table10 is a preset: agentsd-eval table --config table10"),
        ("check --calibrated gone.json", "--calibrated = gone.json: no such file; agentsd-eval calibrate"),
    ],
)
def test_a_wrong_option_is_one_message(words, message):
    if {"cuda:77", "--offload"} & {*words.split()} and torch.cuda.is_available():
        pytest.skip("there may be a CUDA device")
    printed = invoke(*words.split(), code=2)
    assert message in printed
    assert printed.lower().count("error: ") == 1


IN_A_FOLDER = (
    ("calibrate --speedup 1.5 --out empty", "--out = empty: it is a folder; name a file that ends in .json"),
    ("compare --out grid.txt", "--out = grid.txt: name a file that ends in .png"),
    ("compare --out file.txt/x.png", "--out = file.txt/x.png: file.txt is a file; name a folder"),
    ("table --out file.txt", "--out = file.txt: file.txt is a file; name a folder"),
    ("latency --out file.txt", "--out = file.txt: file.txt is a file; name a folder"),
    ("table --limit 4 --out file.txt/x", "--out = file.txt/x-limit-4: file.txt is a file; name a folder"),
    ("table --model empty", "--model = empty: it has no model_index.json; give the folder of"),
    ("table --model bad.safetensors", "--model = bad.safetensors: it is no .safetensors file"),
    ("table --prompts blank.txt", "blank.txt is empty"),
    ("table --prompts file.txt --classes file.txt", "--prompts and --classes exclude each other: give one"),
    ("table --reference empty", "empty holds 0 images"),
    ("fid empty empty", "empty holds 0 images"),
)


@pytest.mark.parametrize(("words", "message"), IN_A_FOLDER)
def test_a_wrong_path_is_one_message_and_nothing_is_made(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, content in (("file.txt", "a cat"), ("blank.txt", ""), ("bad.safetensors", "no weights")):
        (tmp_path / name).write_text(content)
    before = {*tmp_path.rglob("*")}
    assert invoke(*words.split(), code=2).startswith(f"error: {message}")
    assert {*tmp_path.rglob("*")} == before


OPTIONS = (
    "table --model", "table --methods", "table --device", "table --scheduler", "table --prompts",
    "table --reference", "table --steps", "table --samplers", "table --config", "compare --ratio",
    "latency --arch", "check --calibrated", "fid", "report", "calibrate --speedup", "", "table",
)  # fmt: skip
LONG = ("x" * 5000, " ".join(["word"] * 1000), "/" + "/".join(["folder"] * 700))


@pytest.mark.parametrize("value", LONG, ids=["letters", "words", "path"])
@pytest.mark.parametrize("words", OPTIONS)
def test_no_error_repeats_a_long_value(words, value):
    """Whether it is an option's, a command's, or one too many."""
    told = run(*words.split(), value, code=2).output
    assert len(told) < 1500, told[:300]
    assert max(len(part) for part in re.findall(r"(?:word ?)+|x+|(?:/folder)+", told + "x")) < 620


@pytest.mark.parametrize(
    ("message", "short"),
    [
        (f"can't read {'a' * 400}b", f"can't read {'a' * 60}...{'a' * 59}b"),
        (f"mode='{'a b' * 200}': choose", f"mode='{('a b' * 200)[:59]}...{('a b' * 200)[-59:]}': choose"),
        ("it isn't there, " + "and " * 90 + "that's all", None),
        ("/tmp/" + "b" * 200, None),
    ],
)
def test_values_are_shortened_and_prose_is_not(message, short):
    assert shortened(message) == (short or message)


def test_a_message_of_many_values_is_cut():
    assert len(shortened("[1, 2], " * 1000)) < 2100


@pytest.mark.parametrize(("command", "said"), [("table", "goes on from here"), ("compare", "begins anew")])
def test_ctrl_c_says_how_to_go_on(command, said, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"agentsd_eval.studies.{command}.command", interrupted)
    assert invoke(command, code=130) == f"stopped; the same command {said}"


def test_a_missing_package_is_told_before_any_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_fid", None)
    work = "agentsd_eval.studies.table.load_pipeline"
    monkeypatch.setattr(work, lambda *args, **kwargs: pytest.fail("began"))
    printed = invoke("table", "--features", "inception", code=2)
    assert "pip install pytorch-fid==0.3.0, or use --features efficientnet-lite0" in printed


def test_a_method_that_the_sampler_does_not_suit_is_told_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("agentsd_eval.studies.table.load_real", lambda *args: pytest.fail("began"))
    words = ("--methods", "deepcache-2", "--scheduler", "plms", "--steps", 25, "--out", tmp_path)
    assert "use --scheduler ddim" in invoke("table", *words, code=2)
    assert not list(tmp_path.iterdir())
