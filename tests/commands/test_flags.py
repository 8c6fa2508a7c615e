"""absl flags derived from Config."""

import dataclasses
import re

import pytest

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config, option_names


@pytest.fixture
def flags():
    """All options of Config, and one flag of each kind of the command's own."""
    flags = CommandFlags("paint", option_names())
    flags.define("colour", "red", "which colour")
    flags.define("coats", 2, "how often")
    flags.define("gap", 0.5, "how far apart")
    flags.define("gloss", False, "whether it shines")
    return flags


def test_recipes_are_for_commands_that_train(capsys):
    for options, argument in ((("seed", "model"), "FILE"), (("seed", "duration"), "RECIPE")):
        with pytest.raises(SystemExit):
            CommandFlags("paint", options).parse(["--help"])
        assert f"usage: imagenet-fast paint [--flagfile={argument}] " in capsys.readouterr().out


def test_a_renamed_flag_is_accepted_with_a_notice(capsys):
    flags = CommandFlags("plan")
    flags.define("slow_fraction", 0.0, "slow devices")
    for arguments in (["--slow_share=0.5"], ["--slow_share", "0.5"]):
        flags.parse(arguments)
        assert flags["slow_fraction"] == 0.5
        flags.parse(["--slow_fraction=0"])
    assert capsys.readouterr().err == "--slow_share is now --slow_fraction\n"
    assert flags.own_names() == ["slow_fraction"]


def test_nothing_given(flags):
    assert flags.parse([]) == []
    assert flags.changes() == {}
    assert (flags["colour"], flags["coats"], flags["gloss"]) == ("red", 2, False)
    for field in dataclasses.fields(Config):
        assert flags[field.name] == field.default


def test_all_forms(flags):
    flags.parse(
        [
            "--batch_size=512",
            "--learning_rate",
            "0.5",
            "-seed=3",
            "--xla",
            "--noflip",
            "--nesterov=false",
            "--duration=1e6 examples",
            "--decay_at=3 epochs,6epochs",
            "--pixel_std=1,2,3",
            "--data_dir=a=b",
            "--colour=blue",
            "--coats=3",
            "--gloss",
        ]
    )
    assert flags.changes() == {
        "batch_size": 512,
        "learning_rate": 0.5,
        "seed": 3,
        "xla": True,
        "flip": False,
        "nesterov": False,
        "duration": Duration(1e6, "examples"),
        "decay_at": (Duration(3, "epochs"), Duration(6, "epochs")),
        "pixel_std": (1.0, 2.0, 3.0),
        "data_dir": "a=b",
    }
    assert (flags["colour"], flags["coats"], flags["gloss"]) == ("blue", 3, True)
    assert Config().replace(**flags.changes()).pixel_std == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("name", option_names())
def test_each_option_can_be_given_as_text(flags, name):
    """What is given counts as given, even where it is the default."""
    default = getattr(Config(), name)
    flags.parse([f"--{name}={option_text(default)}"])
    assert flags.changes() == {name: default}


def test_default_given_is_a_change_but_a_commands_own_flag_is_not(flags):
    flags.parse(["--seed=0", "--colour=red"])
    assert flags.changes() == {"seed": 0}


def test_later_flag_wins(flags):
    flags.parse(["--seed=1", "--xla", "--seed=2", "--noxla"])
    assert flags.changes() == {"seed": 2, "xla": False}


def test_two_commands_do_not_share_flags():
    first, second = CommandFlags("a", ["seed"]), CommandFlags("b", ["seed"])
    first.parse(["--seed=1"])
    second.parse([])
    assert (first["seed"], second["seed"]) == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bach_size=3"], "there is no flag --bach_size; did you mean --batch_size"),
        (["--color=red"], "there is no flag --color; did you mean --colour"),
        (["--qqq"], "there is no flag --qqq"),
        (["--batch_size=many"], "batch_size is 'many', but must be a whole number"),
        (["--batch_size=2.5"], "batch_size is '2.5', but must be a whole number"),
        (["--learning_rate=high"], "learning_rate is 'high', but must be a number"),
        (["--duration=90"], "'90' is not a duration"),
        (["--duration=1e400 epochs"], "'1e400 epochs' is not a duration: '1e400' is too large"),
        (["--decay_at=3 epochs,6"], "'6' is not a duration"),
        (["--xla=maybe"], "xla is 'maybe', but must be true or false"),
        (["--gloss=yes"], "gloss is 'yes', but must be true or false"),
        (["--noxla=true"], "--noxla=true does not take an argument"),
        (["--coats=two"], "coats is 'two', but must be a whole number"),
        (["--gap=nan"], "gap is nan, but must be finite: "),
        (["--gap=inf"], "gap is inf, but must be finite: "),
        (["--batch_size"], "batch_size"),
        (["train"], "unexpected argument 'train': options are written --name=value"),
        (["--xla", "true"], "unexpected argument 'true'"),
        (["--flagfile"], "write --flagfile=RECIPE"),
        (["--flagfile="], "write --flagfile=RECIPE"),
        (["--flagfile=none.flags"], "cannot read flagfile none.flags: No such file"),
    ],
)
def test_rejected(flags, arguments, message):
    with pytest.raises(UserError) as caught:
        flags.parse(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_message_names_the_option_once(flags):
    with pytest.raises(UserError, match=r"^duration: '12' is not a duration: write a number"):
        flags.parse(["--duration=12"])


def test_a_flagfile_after_a_flag_overrides_it_with_a_notice(flags, capsys):
    flags.parse(["--duration=6 epochs", "--flagfile=digits"])
    assert flags.changes()["duration"] == Duration(12, "epochs")
    notice = "--flagfile=digits overrides the --duration before it: flags go after --flagfile\n"
    assert capsys.readouterr().err == notice
    flags.parse(["--flagfile=photos", "--flagfile=digits", "--batch_size=64"])
    assert capsys.readouterr().err == ""


def test_option_of_another_command_is_unknown():
    with pytest.raises(UserError, match="no flag --batch_size"):
        CommandFlags("evaluate", ["seed"]).parse(["--batch_size=3"])
    with pytest.raises(UserError, match="no flag --model"):
        CommandFlags("evaluate", ["seed"]).parse(["--flagfile=digits"])


def test_a_flagfiles_value_is_read_like_a_flags(flags):
    flags.parse(["--flagfile=digits"])
    assert flags["batch_size"] == 32
    flags.parse(["--flagfile=digits", "--batch_size=64"])
    assert flags["batch_size"] == 64


def test_a_flag_before_a_flagfile_that_makes_it_ineffective_is_refused(flags):
    flags.parse(["--decay_factor=0.5", "--flagfile=photos"])
    with pytest.raises(UserError, match=r"decay_factor=0\.5 is for schedule=steps"):
        Config().replace(**flags.changes())


def test_positional_arguments(flags):
    rest = flags.parse(["a.jpg", "--seed=1", "b.jpg", "--", "--c.jpg"], positional="FILE")
    assert rest == ["a.jpg", "b.jpg", "--c.jpg"]
    assert flags["seed"] == 1


def test_flagfile_in_its_place(flags, tmp_path):
    (tmp_path / "base.flags").write_text("# A comment.\n--seed=3\n--momentum=0.5\n")
    (tmp_path / "top.flags").write_text(
        "// Another.\n\n--seed=2\n--flagfile=base.flags\n--noflip\n--duration=10 epochs\n"
    )
    path = tmp_path / "top.flags"
    flags.parse(["--seed=1", "--lighting=0.1", f"--flagfile={path}", "--momentum=0.8", "--xla"])
    assert flags.changes() == {
        "seed": 3,
        "lighting": 0.1,
        "momentum": 0.8,
        "flip": False,
        "duration": Duration(10, "epochs"),
        "xla": True,
    }


def test_a_flagfile_yields_to_a_later_choice(flags, tmp_path):
    path = tmp_path / "a.flags"
    path.write_text("--optimizer=lars\n--lars_eeta=0.01\n--nonesterov\n")
    flags.parse([f"--flagfile={path}", "--optimizer=sgd"])
    assert flags.changes() == {"optimizer": "sgd", "nesterov": False}
    for arguments in (["--optimizer=sgd", "--lars_eeta=0.02"], ["--lars_eeta=0.02"]):
        flags.parse([f"--flagfile={path}", *arguments])
        assert flags.changes()["lars_eeta"] == 0.02


def test_flagfile_in_the_users_home(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.flags").write_text("--flagfile=~/b.flags\n")
    (tmp_path / "b.flags").write_text("--seed=3\n")
    flags.parse(["--flagfile=~/a.flags"])
    assert flags.changes() == {"seed": 3}


def test_flagfile_with_an_unknown_option_names_the_line(flags, tmp_path):
    path = tmp_path / "a.flags"
    path.write_text("--seed=1\n--bach_size=3\n")
    with pytest.raises(UserError, match=r"a\.flags, line 2: there is no option 'bach_size'; did"):
        flags.parse([f"--flagfile={path}"])


@pytest.mark.parametrize("argument", ["--help", "-h", "--helpfull"])
def test_help(flags, capsys, argument):
    with pytest.raises(SystemExit) as end:
        flags.parse(["--seed=1", argument])
    assert end.value.code == 0
    page = capsys.readouterr().out
    assert page.startswith("usage: imagenet-fast paint [--flagfile=RECIPE] [--flag=value ...]\n")
    assert max(map(len, page.splitlines())) <= 96
    words = " ".join(page.split())
    for field in dataclasses.fields(Config):
        text, choices = field.metadata["help"], field.metadata["choices"]
        listed = f": {', '.join(choices)}" if choices and ": " not in text else " "
        assert f"{field.name}: {text}{listed}" in f"{words} "
        assert f"\n{field.metadata['group']}:\n" in page
        if field.default not in ("", ()):
            assert f"(default: {option_text(field.default)})" in words
    for name in Config.__dataclass_fields__["model"].metadata["choices"]:
        assert name in words
    assert "--[no]gloss: whether it shines (default: false)" in words
    assert "--[no]xla:" in words
    assert "--coats: how often (default: 2)" in words
    assert "(default: 90 epochs)" in words
    assert "(default: 30 epochs,60 epochs,80 epochs)" in words


def test_short_help_and_the_rest(capsys):
    pages = {}
    for argument in ("--help", "-h", "--helpfull"):
        flags = CommandFlags("paint", ("seed", "xla", "flip", "lighting"), main=("xla", "seed"))
        flags.define("coats", 2, "how often")
        with pytest.raises(SystemExit):
            flags.parse([argument])
        pages[argument] = capsys.readouterr().out
    named = {
        page: re.findall(r"^  --(?:\[no\])?(\w+):", text, re.M) for page, text in pages.items()
    }
    assert named["--help"] == named["-h"] == ["seed", "xla", "coats"]
    assert named["--helpfull"] == ["seed", "xla", "flip", "lighting", "coats"]
    # No heading without flags under it.
    headings = re.findall(r"^(\w.*):$", pages["--help"], re.M)
    assert headings == ["optimization", "hardware", "paint"]
    last = "\n\nimagenet-fast paint --helpfull lists 2 more flags.\n"
    assert pages["--help"].endswith(last)
    assert "--helpfull" not in pages["--helpfull"]
    assert flags["flip"] is True


def test_help_of_a_command_with_files(capsys):
    with pytest.raises(SystemExit):
        CommandFlags("predict").parse(["--help"], positional="FILE")
    assert "[--flag=value ...] FILE ...\n" in capsys.readouterr().out


def test_help_of_what_works_on_a_run(capsys):
    """Whose options count, not Config's defaults; and what the command is for."""
    flags = CommandFlags("evaluate", ("model_dir", "precision"), of_run=True)
    flags.define("json", False, "print JSON")
    with pytest.raises(SystemExit):
        flags.parse(["--help"])
    text = capsys.readouterr().out
    assert "measure the accuracy of a trained model" in text
    assert "--model_dir: directory of the training run\n" in text
    assert "(default: as in training)" in " ".join(text.split())
    assert "float32)" not in text
    assert "--[no]json: print JSON (default: false)" in text


def test_commands_without_options_take_no_flagfile(capsys):
    with pytest.raises(SystemExit):
        CommandFlags("prepare").parse(["--help"])
    assert "usage: imagenet-fast prepare [--flag=value ...]\n" in capsys.readouterr().out


def test_times_follow_a_duration_after_the_recipe(tmp_path, capsys):
    flags = CommandFlags("train", option_names())
    path = tmp_path / "a.flags"
    path.write_text("--duration=12 epochs\n--decay_at=8 epochs\n--warmup=3 epochs\n")
    flags.parse([f"--flagfile={path}", "--duration=3 epochs", "--warmup=1 epoch"])
    changes = flags.changes()
    assert {name: option_text(value) for name, value in changes.items()} == {
        "duration": "3 epochs",
        "decay_at": "2 epochs",
        "warmup": "1 epoch",
    }


def test_a_run_that_is_extended_keeps_its_times(flags, capsys):
    recipe = "--flagfile=digits"
    flags.parse([recipe])
    run = Config().replace(**flags.changes())
    assert run.decay_at == (Duration(8, "epochs"), Duration(11, "epochs"))
    flags.parse([recipe, "--duration=24 epochs"])
    longer = Config().replace(**flags.changes(run))
    assert longer == run.replace(duration="24 epochs")
    # Interrupted, it resumes by the same command.
    assert Config().replace(**flags.changes(longer)) == longer
    assert capsys.readouterr().err == ""
    # Given explicitly; and for a new run, or the same duration, scaled as always.
    flags.parse([recipe, "--duration=24 epochs", "--decay_at=9 epochs"])
    assert flags.changes(run)["decay_at"] == (Duration(9, "epochs"),)
    flags.parse([recipe, "--duration=24 epochs", "--schedule=cosine"])
    assert "decay_at" not in flags.changes(run)


def test_a_run_keeps_its_times_and_says_so_if_a_flagfile_has_others(flags, capsys):
    flags.parse(["--flagfile=digits"])
    run = Config().replace(model_dir="run", **flags.changes()).replace(decay_at="5 epochs")
    assert flags.changes(run)["decay_at"] == (Duration(5, "epochs"),)
    assert capsys.readouterr().err == "the run in run keeps its schedule: --decay_at='5 epochs'\n"


def test_a_run_without_knots_does_not_take_those_of_a_recipe(flags):
    flags.parse(["--flagfile=myrtle_cifar10"])
    changes = flags.changes(Config(model_dir="run"))
    assert len(changes["knots"]) == len(changes["knots_at"]) == 3


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--learning-rate=1", "; did you mean --learning_rate or "),
        ("--batch-size=64", "; did you mean --batch_size or "),
        ("--batchsize=64", "; did you mean --batch_size or "),
        ("--zzz=1", "; `imagenet-fast paint --helpfull` lists the flags"),
    ],
)
def test_an_unknown_flag_leads_to_the_closest(flags, given, hint):
    with pytest.raises(UserError, match=re.escape(hint)):
        flags.parse([given])


def test_a_shortened_run_resumes_by_the_same_command(flags, capsys):
    flags.parse(["--flagfile=digits", "--duration=6 epochs"])
    run = Config().replace(model_dir="run", **flags.changes())
    assert run.decay_at == (Duration(4, "epochs"), Duration(5.5, "epochs"))
    capsys.readouterr()
    assert Config().replace(model_dir="run", **flags.changes(run)) == run
    notice = "the run in run keeps its schedule: --decay_at='4 epochs,5.5 epochs'\n"
    assert capsys.readouterr().err == notice


def test_a_run_with_unscaled_times_resumes(flags, tmp_path):
    """Earlier versions did not scale the times of a recipe that a flagfile includes."""
    path = tmp_path / "short.flags"
    path.write_text("--flagfile=digits\n--duration=6 epochs\n")
    flags.parse([f"--flagfile={path}"])
    new = Config().replace(**flags.changes())
    assert new.decay_at == (Duration(4, "epochs"), Duration(5.5, "epochs"))
    old = new.replace(decay_at="8 epochs,11 epochs")
    assert Config().replace(**flags.changes(old)) == old
    assert Config().replace(**flags.changes(new)) == new
