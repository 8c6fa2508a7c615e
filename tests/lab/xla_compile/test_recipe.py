"""The search for a variant that fits, with a fake compiler."""

import contextlib
import dataclasses
import types

import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.lab.xla_compile import recipe
from imagenet_fast.lab.xla_compile.compiler import Program, RefusedError
from imagenet_fast.lab.xla_compile.gpus import gpu_topology
from imagenet_fast.lab.xla_compile.module import Module

GIB = 2**30
EMPTY = Module((), (), (), {})


class Compiler:
    """A fake that needs 1 GiB and 1/16 GiB per image of a micro-batch, and rejects given sizes."""

    def __init__(self, refuses=()):
        self.refuses, self.compiled = refuses, []

    def compile(self, topology, step):
        images, parts = step
        self.compiled.append((images, parts))
        if images // parts in self.refuses:
            raise RefusedError("INTERNAL: no such program")
        need = GIB + images // parts * GIB // 16
        memory = dict.fromkeys(("arguments", "outputs", "shared", "code"), 0)
        return Program(1.0, {**memory, "temporary": need}, 1.0, 0, EMPTY)


def lower(config, step_of=None):
    model = types.SimpleNamespace(labels=range(10), trainable_variables=[])
    images = config.batch_size // 8
    step = types.SimpleNamespace(serialized=(images, config.accumulation_steps), module=EMPTY)
    return model, step


@pytest.fixture
def made(monkeypatch):
    """made(compiler, **options): the recipe with fake lowering."""
    monkeypatch.setattr(recipe, "check_types", lambda *_: [])
    monkeypatch.setattr(recipe, "check_all_reduces", lambda *_: [])

    def make(compiler, **options):
        config = Config(synthetic=True, num_classes=10, **options)
        own = recipe._Recipe(config, compiler, gpu_topology("v100:1x8"), {})
        own.lowered = lower
        return own, config

    return make


def sizes(tried):
    return [own.size for own in tried]


def test_largest_batch(made):
    # 13.50 GiB: 199 images; 192 is the last multiple of 8.
    compiler = Compiler()
    own, _ = made(compiler, batch_size=8 * 64)
    found = own.with_largest_batch()
    assert found.batch == 192
    assert found.fits
    assert {64, 192, 200} <= set(sizes(found.batches))
    assert len(compiler.compiled) <= 4
    assert found.program.peak == 13 * GIB
    assert sizes(found.batches) == sorted(sizes(found.batches))


def test_largest_batch_in_parts(made):
    own, _ = made(Compiler(), batch_size=8 * 64 * 3, accumulation_steps=3)
    found = own.with_largest_batch()
    assert found.batch == 3 * 192
    assert found.config.accumulation_steps == 3


def test_no_batch_that_fits(made):
    own, _ = made(Compiler(refuses=range(10**6)), batch_size=8 * 64)
    found = own.with_largest_batch()
    assert found.batch == 8
    assert "it does not compile for v100:1x8: no such program" in found.failure


def test_batches_that_the_data_does_not_have(made):
    own, _ = made(Compiler(), batch_size=8 * 64)

    def of_a_few(config):
        if config.batch_size > 1000:
            raise UserError("more than the 1000 training images")
        return lower(config)

    own.lowered = of_a_few
    found = own.with_largest_batch()
    assert found.batch == 120
    refused = {own.size: own.refusal for own in found.batches if own.size > 120}
    assert set(refused.values()) == {"more than the 1000 training images"}
    assert 128 in refused


def test_batches_that_batch_norm_cannot_split_are_left_out(made):
    own, _ = made(Compiler(), batch_size=8 * 64, batch_norm_batch_size=48)
    found = own.with_largest_batch()
    # Of 8 replicas, 1, 2, 4 or 8 have 48 images together, or each has a multiple of them.
    assert found.batch == 192
    larger = [size for size in sizes(found.batches) if size > 192]
    assert larger and not any(size % 48 for size in larger)


def test_a_recipe_s_own_batch_that_cannot_be_used(made):
    own, _ = made(Compiler(), batch_size=8 * 64)

    def refuse(config):
        raise UserError("more than the 100 training images")

    own.lowered = refuse
    with pytest.raises(UserError, match="more than the 100 training images"):
        own.with_largest_batch()


@pytest.fixture
def compiled_configs(monkeypatch):
    """The configurations of the steps that ``compile_recipe`` would lower."""
    found = []

    def lowered(self, config):
        found.append(config)
        return lower(config)

    @contextlib.contextmanager
    def start(*_):
        yield types.SimpleNamespace(
            topology=gpu_topology, compile=lambda _, step: Compiler().compile(_, step)
        )

    monkeypatch.setattr(recipe, "check_types", lambda *_: [])
    monkeypatch.setattr(recipe, "check_all_reduces", lambda *_: [])
    monkeypatch.setattr(recipe._Recipe, "lowered", lowered)
    monkeypatch.setattr(recipe, "require_packages", lambda _: {})
    monkeypatch.setattr(recipe, "start_compiler", start)
    return found


@pytest.mark.parametrize(("sizes", "largest"), [((128,), 128), ((32, 48), 64), ((), 64)])
def test_the_largest_size_of_the_run(compiled_configs, sizes, largest):
    until = tuple(f"{number + 1} epochs" for number, _ in enumerate(sizes))
    options = {"train_sizes": sizes, "train_until": until} if sizes else {}
    config = Config(image_size=64, batch_size=64).replace(**options)
    found = recipe.compile_recipe(config, "v100:1x8")
    assert [own.image_size for own in compiled_configs] == [largest]
    assert found.config.image_size == largest


def test_fusion_that_is_measured(compiled_configs):
    with pytest.raises(UserError, match="fusion=auto measures on the devices that train"):
        recipe.compile_recipe(Config(batch_size=64, fusion="auto"), "v100:1x8")
    assert not compiled_configs


def test_groups_that_do_not_divide_the_replicas(compiled_configs):
    config = Config(batch_size=64, all_reduce="hierarchical", all_reduce_group=3)
    with pytest.raises(UserError, match="8 replicas cannot be split into groups of 3"):
        recipe.compile_recipe(config, "v100:1x8")
    assert not compiled_configs


def accumulated(own, config):
    found = own.compiled(config, *own.lowered(config))
    assert not found.fits
    return dataclasses.replace(found, accumulations=own.accumulations(found))


@pytest.mark.parametrize(
    ("images", "steps", "wanted"),
    [
        (576, 1, 3),  # 192 at once; doubling says 4
        (1000, 1, 8),  # 125 at once: of 1000's divisors, 5 is too few
        (2 * 199, 1, 2),
        (600, 2, 4),  # 300 at once do not fit, 200 neither
        (211, 1, 211),  # a prime number
    ],
)
def test_fewest_accumulation_steps(made, images, steps, wanted):
    compiler = Compiler()
    own, config = made(compiler, batch_size=8 * images, accumulation_steps=steps)
    found = accumulated(own, config)
    assert found.failure.endswith(f"the smallest --accumulation_steps that fits is {wanted}")
    # All fewer ones that divide the images are known not to fit, by the next one.
    fewer = [parts for parts in range(steps, wanted) if images % parts == 0]
    assert fewer[-1] in sizes(found.accumulations)
    assert len(compiler.compiled) <= 4


def test_accumulation_steps_that_cannot_be_used(made):
    own, config = made(Compiler(), batch_size=8 * 576)
    found = own.compiled(config, *own.lowered(config))

    def refuse(config):
        raise UserError("batch norm's groups cannot be made")

    own.lowered = refuse
    found = dataclasses.replace(found, accumulations=own.accumulations(found))
    refused = [own for own in found.accumulations if own.size > 1]
    assert {(own.peak, own.refusal) for own in refused} == {
        (None, "batch norm's groups cannot be made")
    }
    assert "no --accumulation_steps makes it fit" in found.failure


def test_optimized_modules_are_not_kept(made):
    own, config = made(Compiler(), batch_size=8)
    assert own.compiled(config, *own.lowered(config)).program.optimized is None
