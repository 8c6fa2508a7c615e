"""The command's flags; what it does is in tests/xla_compile."""

import pytest

from imagenet_fast.commands import run


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        run(["compile", "--help"])
    page = capsys.readouterr().out
    assert page.startswith("usage: imagenet-fast compile ")
    for flag in ("--topology", "--run_on_cpu", "--output_dir", "--batch_norm_batch_size"):
        assert flag in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topologie=v3:2x2"], "there is no flag --topologie; did you mean --topology?"),
        (["--run_on_cpu=-1"], "run_on_cpu is -1, but must not be negative"),
        (["--flagfile=no"], "cannot read flagfile no"),
        (["v3:2x2"], "unexpected argument 'v3:2x2'"),
        (["--output_dir=setup.cfg/results"], "cannot write to setup.cfg/results: Not a directory"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert run(["compile", *arguments]) == 2
    assert message in capsys.readouterr().err
