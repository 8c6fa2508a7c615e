"""Flagfiles: how they are read, and what holds where one gives options over another."""

import pathlib

import pytest

import imagenet_fast
from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.config import Config
from imagenet_fast.flagfiles import Length, scale_times

PACKAGE = pathlib.Path(imagenet_fast.__file__).parent


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


# --- Reading


def test_flagfile(write):
    path = write(
        "recipe.flags",
        """
# facebook_1h, for 256 GPUs.
// Both marks of a comment are absl's.
--batch_size=8192
  --duration=90 epochs
--decay_at=30 epochs,60 epochs, 80 epochs
--noflip
--xla
-seed=3
--model_dir=/runs/a=b
--seed=4
""",
    )
    expected = Config(batch_size=8192, flip=False, xla=True, model_dir="/runs/a=b", seed=4)
    assert Config.from_flagfile(path) == expected
    assert Config.from_flagfile(str(path), seed=5, warmup="0 steps") == expected.replace(
        seed=5, warmup=Duration(0, "steps")
    )


def test_nested_flagfile_in_its_place(write):
    write("sub/base.flags", "--seed=1\n--batch_size=64\n")
    write("sub/middle.flags", "--seed=2\n--flagfile=base.flags\n--momentum=0.5\n")
    top = write("top.flags", "--batch_size=32\n--flagfile=sub/middle.flags\n--momentum=0.8\n")
    assert Config.from_flagfile(top) == Config(seed=1, batch_size=64, momentum=0.8)


def test_including_a_file_twice_is_no_cycle(write):
    write("base.flags", "--seed=1\n")
    top = write("top.flags", "--flagfile=base.flags\n--seed=2\n--flagfile=base.flags\n")
    assert Config.from_flagfile(top).seed == 1


def test_changes_may_resolve_a_recipes_contradiction(write):
    path = write("a.flags", "--synthetic\n")
    assert Config.from_flagfile(path, num_classes=10).synthetic
    with pytest.raises(UserError, match="needs num_classes"):
        Config.from_flagfile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--bach_size=3", "line 1: there is no option 'bach_size'; did you mean 'batch_size'"),
        ("\n\n--batch_size=x", "line 3: batch_size is 'x', but must be a whole number"),
        ("batch_size=3", "line 1: 'batch_size=3' is not a flag"),
        ("--batch_size 3", "line 1: there is no option 'batch_size 3'"),
        ("--data_dir", "line 1: data_dir needs a value: --data_dir=..."),
        ("--nodata_dir", "line 1: data_dir needs a value: --data_dir=..."),
        ("--batch_size", "line 1: batch_size needs a value"),
        ("--nozzle", "line 1: there is no option 'nozzle'"),
        ("--xla=maybe", "line 1: xla is 'maybe', but must be true or false"),
        ("--duration=90", "line 1: duration: '90' is not a duration"),
        ("--flagfile=a.flags", "includes itself"),
        ("--flagfile=none.flags", "none.flags: No such file"),
        ("--flagfile", "Is a directory"),
    ],
)
def test_bad_flagfile(write, text, message):
    path = write("a.flags", text)
    with pytest.raises(UserError) as caught:
        Config.from_flagfile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value) or "flagfile" in str(caught.value)


def test_cycle_of_flagfiles(write):
    first = write("a.flags", "--flagfile=b.flags")
    write("b.flags", "--flagfile=a.flags")
    with pytest.raises(UserError, match="includes itself"):
        Config.from_flagfile(first)


def test_flagfile_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"cannot read flagfile .*none\.flags: No such file"):
        Config.from_flagfile(tmp_path / "none.flags")
    with pytest.raises(UserError, match="Is a directory"):
        Config.from_flagfile(tmp_path)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(UserError, match="it is not text"):
        Config.from_flagfile(tmp_path / "image.png")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("flags/fashon_mnist.flags", "'fashion_mnist'"),
        ("digit", "'digits'"),
        ("facebook_1h_8K.flags", "'facebook_1h_8k'"),
        ("{folder}/mine.flag", "'{folder}/mine.flags'"),
    ],
)
def test_similar_flagfiles_are_suggested(tmp_path, monkeypatch, given, meant):
    monkeypatch.chdir(PACKAGE.parent)
    (tmp_path / "mine.flags").touch()
    with pytest.raises(UserError, match="No such file or directory; did you mean ") as caught:
        Config.from_flagfile(given.format(folder=tmp_path))
    assert meant.format(folder=tmp_path) in str(caught.value)


def test_no_similar_flagfile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"nowhere/xyz\.flags: No such file or directory$"):
        Config.from_flagfile("nowhere/xyz.flags")


# --- A flagfile over another one


def test_a_flagfile_yields_to_a_later_choice(write):
    base = write("base.flags", "--schedule=steps\n--decay_factor=0.5\n--seed=1\n")
    assert Config.from_flagfile(base, schedule="cosine") == Config(schedule="cosine", seed=1)
    other = write("other.flags", "--optimizer=rmsprop\n--optimizer_epsilon=1\n")
    assert Config.from_flagfile(other, optimizer="sgd") == Config()
    top = write("top.flags", "--flagfile=base.flags\n--schedule=cosine\n--end_learning_rate=0.1\n")
    expected = Config(schedule="cosine", end_learning_rate=0.1, seed=1)
    assert Config.from_flagfile(top) == expected
    # It holds again where a still later choice has a use for it.
    again = Config.from_flagfile(top, schedule="steps", end_learning_rate=0)
    assert again == Config.from_flagfile(base)


def test_another_model_after_a_recipe_resets_its_options():
    recipe = PACKAGE / "flags" / "myrtle_cifar10.flags"
    assert Config.from_flagfile(recipe).whitening
    for config in (
        Config.from_flagfile(recipe, model="resnet18"),
        Config.from_flagfile(recipe).replace(model="resnet18"),
    ):
        assert (config.whitening, config.pool_order) == (False, "conv_bn_relu_pool")
        assert (config.activation, config.celu_alpha) == ("auto", 0.075)  # one by the other


@pytest.mark.parametrize(
    "text",
    [
        "--schedule=cosine\n--decay_factor=0.5\n",
        "--decay_factor=0.5\n--schedule=cosine\n",
        "--flagfile=cosine.flags\n--decay_factor=0.5\n",
    ],
)
def test_a_flagfile_does_not_contradict_itself(write, text):
    write("cosine.flags", "--schedule=cosine\n")
    with pytest.raises(UserError, match=r"decay_factor=0\.5 is for schedule=steps"):
        Config.from_flagfile(write("a.flags", text))


@pytest.mark.parametrize(
    ("changes", "replicas"),
    [
        ({}, (8, 2)),
        ({"batch_size": 64}, (8, 2)),  # as in the recipe
        ({"batch_size": 32}, ()),
        ({"batch_size": 32, "replicas": (4,)}, (4,)),
    ],
)
def test_replicas_belong_to_the_batch_size(write, changes, replicas):
    path = write("recipe.flags", "--batch_size=64\n--replicas=8,2\n")
    assert Config.from_flagfile(path, **changes).replicas == replicas


def test_times_follow_a_duration_after_the_recipe(write, capsys):
    recipe = write(
        "recipe.flags",
        "--duration=90 epochs\n--warmup=5 epochs\n--decay_at=30 epochs,60 epochs\n"
        "--train_sizes=96,128\n--train_until=18 epochs,36 epochs\n",
    )
    whole = Config.from_flagfile(recipe)
    short = Config.from_flagfile(recipe, duration="18 epochs")
    assert short == whole.replace(
        duration="18 epochs",
        warmup="1 epoch",
        decay_at="6 epochs,12 epochs",
        train_until="3.6 epochs,7.2 epochs",
    )
    assert "--warmup='1 epoch' --decay_at='6 epochs,12 epochs'" in capsys.readouterr().err
    given = Config.from_flagfile(recipe, duration="180 epochs", decay_at="100 epochs")
    assert (str(given.warmup), option_text(given.decay_at)) == ("10 epochs", "100 epochs")
    assert Config.from_flagfile(recipe, duration="90 epochs") == whole
    # Not rounded: 17936338 examples.
    pod = "google_tpu_pod_32k"
    assert Config.from_flagfile(pod, duration="3558 steps") == Config.from_flagfile(pod)
    # In another unit, the same fractions of the run.
    assert Config.from_flagfile(recipe, duration="900 steps") == whole.replace(
        duration="900 steps",
        warmup="50 steps",
        decay_at="300 steps,600 steps",
        train_until="180 steps,360 steps",
    )


def test_times_follow_a_duration_beside_an_included_recipe(write, capsys):
    recipe = write("recipe.flags", "--duration=90 epochs\n--decay_at=30 epochs,60 epochs\n")
    text = "--flagfile=recipe.flags\n--duration=18 epochs\n"
    short = Config.from_flagfile(recipe, duration="18 epochs")
    assert short.warmup == Duration(1, "epochs")
    top = write("top.flags", text)
    assert Config.from_flagfile(top) == short
    assert Config.from_flagfile(write("higher.flags", "--flagfile=top.flags\n")) == short
    # Again scaled: the recipe's times from its duration, the file's own from the file's.
    own = write("own.flags", f"{text}--decay_at=9 epochs\n")
    assert Config.from_flagfile(own) == short.replace(decay_at="9 epochs")
    assert Config.from_flagfile(top, duration="9 epochs") == Config.from_flagfile(
        recipe, duration="9 epochs"
    )
    capsys.readouterr()
    assert Config.from_flagfile(own, duration="9 epochs").decay_at == (Duration(4.5, "epochs"),)
    assert "duration=9 epochs instead of 18 epochs scales" in capsys.readouterr().err
    # A duration that is the file's too scales the times of its recipe.
    fixed = write("fixed.flags", text.replace("18", "15"))
    config = Config.from_flagfile(fixed, duration="15 epochs")
    assert config.decay_at == (Duration(5, "epochs"), Duration(10, "epochs"))
    assert "duration=15 epochs instead of 90 epochs scales" in capsys.readouterr().err


def test_a_flagfile_after_another_one_is_over_it(write):
    """As if the first were included, or the second's lines were flags after it."""
    recipe = write(
        "recipe.flags",
        "--batch_size=32\n--duration=100 steps\n--warmup=320 examples\n--decay_at=60 steps\n"
        "--decay_factor=0.5\n",
    )
    for text, changes in (
        ("--duration=50 steps\n", {"duration": "50 steps"}),
        ("--schedule=cosine\n", {"schedule": "cosine"}),
        (
            "--warmup=10 steps\n--duration=50 steps\n",
            {"warmup": "10 steps", "duration": "50 steps"},
        ),
    ):
        write("other.flags", text)
        both = write("both.flags", "--flagfile=recipe.flags\n--flagfile=other.flags\n")
        assert Config.from_flagfile(both) == Config.from_flagfile(recipe, **changes)


def test_a_time_belongs_to_the_duration_where_it_is_given(write):
    write("recipe.flags", "--duration=90 epochs\n--decay_at=30 epochs\n")
    write("short.flags", "--flagfile=recipe.flags\n--duration=18 epochs\n")
    top = write("top.flags", "--flagfile=short.flags\n--decay_at=9 epochs\n")
    half = Config.from_flagfile(top, duration="9 epochs")
    assert half.decay_at == (Duration(4.5, "epochs"),)
    assert half.warmup == Duration(0.5, "epochs")  # The default, 5 epochs of the recipe's 90.
    # Below any duration: to the first one above.
    write("times.flags", "--decay_at=30 epochs\n")
    above = write("above.flags", "--flagfile=times.flags\n--duration=90 epochs\n")
    assert Config.from_flagfile(above).decay_at == (Duration(30, "epochs"),)
    assert Config.from_flagfile(above, duration="9 epochs").decay_at == (Duration(3, "epochs"),)


def test_times_are_rounded_once(write):
    recipe = write("recipe.flags", "--duration=7 epochs\n--decay_at=3 epochs\n")
    write("third.flags", "--flagfile=recipe.flags\n--duration=0.001 epochs\n")
    again = write("again.flags", "--flagfile=third.flags\n--duration=7 epochs\n")
    assert Config.from_flagfile(again).decay_at == Config.from_flagfile(recipe).decay_at


def test_a_recipe_without_a_length_has_no_fractions(write):
    recipe = write("recipe.flags", "--duration=0 epochs\n--decay_at=3 epochs\n")
    assert Config.from_flagfile(recipe, duration="9 epochs").decay_at == (Duration(3, "epochs"),)


@pytest.mark.parametrize(
    ("times", "duration", "batch_size", "warmup"),
    [
        # Steps of twice the batch size train twice the images.
        ("--duration=100 steps\n--warmup=320 examples\n", "50 steps", 64, "320 examples"),
        ("--duration=100 steps\n--warmup=320 examples\n", "100 steps", 32, "320 examples"),
        ("--duration=100 steps\n--warmup=320 examples\n", "200 steps", 64, "1280 examples"),
        ("--duration=100 steps\n--warmup=10 steps\n", "50 steps", 64, "5 steps"),
        ("--duration=10 epochs\n--warmup=40 steps\n", "20 epochs", 64, "40 steps"),
        ("--duration=10 epochs\n--warmup=1 epochs\n", "20 epochs", 64, "2 epochs"),
        ("--duration=100 steps\n--warmup=10 steps\n", "6400 examples", 64, "640 examples"),
    ],
)
def test_times_follow_a_duration_with_another_batch_size(
    write, times, duration, batch_size, warmup
):
    recipe = write("recipe.flags", f"--batch_size=32\n{times}--schedule=cosine\n")
    changed = Config.from_flagfile(recipe, duration=duration, batch_size=batch_size)
    assert str(changed.warmup) == warmup
    # The same in a file, from which the batch size of the included one differs.
    top = write(
        "top.flags", f"--flagfile=recipe.flags\n--batch_size={batch_size}\n--duration={duration}\n"
    )
    assert Config.from_flagfile(top) == changed
    # And where the batch size is given last, without a duration.
    top = write("top.flags", f"--flagfile=recipe.flags\n--duration={duration}\n")
    assert Config.from_flagfile(top, batch_size=batch_size) == changed


def test_a_batch_size_that_is_replaced_may_be_wrong(write):
    text = "--batch_size=0\n--duration=100 steps\n--warmup=320 examples\n--schedule=cosine\n"
    recipe = write("recipe.flags", text)
    assert Config.from_flagfile(recipe, batch_size=32, duration="50 steps").batch_size == 32


def test_times_in_a_third_unit_are_named(write, capsys):
    text = "--duration=90 epochs\n--warmup=300 steps\n--schedule=cosine\n"
    config = Config.from_flagfile(write("recipe.flags", text), duration="9000 examples")
    assert str(config.warmup) == "300 steps"
    expected = "does not scale warmup=300 steps, which is in another unit: give --warmup, too"
    assert expected in capsys.readouterr().err


def test_times_without_effect_are_not_named(write, capsys):
    recipe = write("recipe.flags", "--duration=90 steps\n--schedule=constant\n--warmup=0 steps\n")
    Config.from_flagfile(recipe, duration="9000 examples")
    assert capsys.readouterr().err == ""


def test_default_times_follow_a_duration(write):
    recipe = write("cosine.flags", "--schedule=cosine\n--duration=30 epochs\n")
    assert str(Config.from_flagfile(recipe, duration="6 epochs").warmup) == "1 epoch"


def test_times_of_no_recipe_do_not_follow_a_duration(write, capsys):
    """Without a duration of their own, they were given for the duration given with them."""
    text = "--decay_at=5epochs,8epochs\n--warmup=1 epoch\n"
    given = Config.from_flagfile(write("times.flags", text), duration="10 epochs")
    assert given == Config(duration="10 epochs", warmup="1 epoch", decay_at="5epochs,8epochs")
    assert Config.from_flagfile(write("empty.flags", ""), duration="18 epochs") == Config(
        duration="18 epochs"
    )
    assert capsys.readouterr().err == ""


def test_train_sizes_after_a_recipe_replace_its_ramp(write):
    ramp = "--size_ramp=128,32\n--size_ramp_at=20 epochs,30 epochs\n"
    recipe = write("recipe.flags", f"--duration=90 epochs\n{ramp}")
    assert Config.from_flagfile(recipe, duration="9 epochs").size_ramp_at == (
        Duration(2, "epochs"),
        Duration(3, "epochs"),
    )
    sizes = {"train_sizes": (96,), "train_until": "9 epochs"}
    assert Config.from_flagfile(recipe, **sizes) == Config(**sizes)


# --- Fractions of a run


def epochs(amount):
    return Duration(amount, "epochs")


def scaled(times, before, after, batch_sizes=(32, 32)):
    return scale_times(times, Length(before, batch_sizes[0]), Length(after, batch_sizes[1]))


def test_a_ratio():
    assert scaled(epochs(30), epochs(90), epochs(18)) == epochs(6)
    assert scaled((epochs(8), epochs(11)), epochs(12), epochs(3)) == (epochs(2), epochs(2.75))
    assert scaled(epochs(1), epochs(3), epochs(1)) == epochs(0.33333)


def test_other_units():
    steps, examples = Duration(1000, "steps"), Duration(3e6, "examples")
    # Of the same fraction of the run: by the durations' ratio, or in the new unit.
    assert scaled(steps, epochs(40), epochs(20)) == Duration(500, "steps")
    assert scaled(epochs(9), epochs(90), steps) == Duration(100, "steps")
    # A first knot of 0 is in the unit of the others.
    assert scaled((epochs(0), epochs(9)), epochs(90), steps) == (
        Duration(0, "steps"),
        Duration(100, "steps"),
    )
    assert scaled((epochs(30), epochs(60)), epochs(90), examples) == (
        Duration(1e6, "examples"),
        Duration(2e6, "examples"),
    )
    assert scaled(steps, epochs(90), examples) is None


def test_nothing_to_scale():
    assert scaled((), epochs(90), epochs(1)) == ()
    assert scaled(epochs(0), Duration(9, "steps"), epochs(1)) == epochs(0)
    # Not rounded.
    times = Duration(17936338, "examples")
    assert scaled(times, epochs(9), epochs(9), (32, 64)) == times
    assert scaled(times, Duration(9, "steps"), Duration(18, "steps"), (64, 32)) == times
