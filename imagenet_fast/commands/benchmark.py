"""``imagenet-fast benchmark``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from imagenet_fast.base.errors import UserError, choices_hint, nearest
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.models.options import MODEL_NAMES

if TYPE_CHECKING:
    from imagenet_fast.lab.benchmarks.report import Report


def main(arguments: list[str]) -> int:
    """Runs the benchmark named by the first argument, and prints its table."""
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h", "--helpfull"):
        print(_help())
        return 0
    if name not in BENCHMARKS:
        raise UserError(
            f"there is no benchmark {name!r}"
            f"{nearest(name, BENCHMARKS) or '; the benchmarks are ' + ', '.join(BENCHMARKS)}"
        )
    run, _ = BENCHMARKS[name]
    run(arguments[1:])
    return 0


def _step(arguments: list[str]) -> None:
    # Keras applications have no weight decay: with 0 both steps do the same work.
    flags = CommandFlags("benchmark step", ("weight_decay",))
    # Options of Config with other defaults: small enough for a CPU, and the same network as the
    # peer's.
    flags.define("model", "resnet50", "resnet50, resnet101 or resnet152")
    flags.define(
        "network",
        "",
        "network of Keras applications, such as EfficientNetV2B0, instead of --model and its peer",
    )
    flags.define("batch_size", 16, "images in a step")
    flags.define("image_size", 224, "height and width of the images, in pixels")
    flags.define("precision", "float32", "float32, mixed_bfloat16 or mixed_float16")
    flags.define(
        "stride_on_1x1",
        True,
        "--model is ResNet v1, as in Keras applications; --nostride_on_1x1: v1.5",
    )
    flags.define("xla", False, "compile all with XLA")
    options = (
        *("model", "batch_size", "image_size", "precision", "stride_on_1x1", "xla"),
        "weight_decay",
    )
    _define_samples(flags, repeats=10, warmup=2)
    flags.define("steps", 1, "training steps in a sample; choose more if a step is short")
    counts = _parsed(flags, arguments, "repeats", "warmup", "steps")
    config = Config(**{name: flags[name] for name in options})

    import_tensorflow()
    from imagenet_fast.lab.benchmarks.report import make_report
    from imagenet_fast.lab.benchmarks.step import compare_steps

    report = make_report(compare_steps(config, network=flags["network"], **counts))
    name = (flags["network"] or config.model).lower()
    name = f"{name}_{config.precision}{'_xla' if config.xla else ''}"
    _print_and_write(report, flags, ("network", *options, *counts), name)


def _resnet9(arguments: list[str]) -> None:
    flags = CommandFlags("benchmark resnet9", ("data_dir",))
    flags.define("recipe", "myrtle_cifar10", "recipe, or flagfile, that gives the other options")
    # Options of Config with other defaults, because the recipes are for a GPU.
    flags.define("width", 16, "channels of the first convolution; 0: as published, 64")
    flags.define("precision", "float32", "float32, mixed_bfloat16 or mixed_float16")
    flags.define("xla", False, "compile all with XLA")
    options = ("width", "precision", "xla")
    _define_samples(flags, repeats=9, warmup=2)
    flags.define("steps", 5, "training steps in a sample")
    counts = _parsed(flags, arguments, "repeats", "warmup", "steps")
    changes = {name: flags[name] for name in ("data_dir", *options)}
    config = Config.from_flagfile(flags["recipe"], **changes)

    import_tensorflow()
    from imagenet_fast.lab.benchmarks.report import make_report
    from imagenet_fast.lab.benchmarks.resnet9 import compare_resnet9

    report = make_report(compare_resnet9(config, **counts))
    name = f"width{config.width or 64}_{config.precision}{'_xla' if config.xla else ''}"
    _print_and_write(report, flags, ("recipe", *changes, *counts), name)


def _optimizer(arguments: list[str]) -> None:
    flags = CommandFlags("benchmark optimizer")
    flags.define("model", "resnet50", f"model with the variables: {', '.join(MODEL_NAMES)}")
    flags.define(
        "model_garden",
        "",
        "directory of an environment made by tools/model_garden.sh, to time its LARS, too",
    )
    _define_samples(flags, repeats=30, warmup=3)
    counts = _parsed(flags, arguments, "repeats", "warmup")
    model = flags["model"]

    import_tensorflow()
    from imagenet_fast.lab.benchmarks.optimizer.compare import compare_optimizers
    from imagenet_fast.lab.benchmarks.report import make_report

    report = make_report(compare_optimizers(model, model_garden=flags["model_garden"], **counts))
    _print_and_write(report, flags, ("model", *counts), model)


def _all_reduce(arguments: list[str]) -> None:
    flags = CommandFlags("benchmark all_reduce")
    flags.define("sizes", "16384,26214400", "bytes of single tensors, separated by commas")
    flags.define(
        "gradients", "resnet50", "models with the gradients, separated by commas; empty: none"
    )
    flags.define(
        "algorithms", "builtin,flat,hierarchical,torus_2d", "algorithms, separated by commas"
    )
    flags.define("group", 0, "replicas in a group or in a row of the torus; 0: the default")
    flags.define(
        "fusion_bytes",
        "26214400",
        "bytes of gradients that are all-reduced at once, separated by commas; 0: all",
    )
    flags.define("dtype", "float32", "dtype of sent gradients: float32, float16 or bfloat16")
    flags.define("latency_within", 0.0, "cost model: ms to a replica of the same group")
    flags.define("latency_between", 0.0, "cost model: ms to a replica of another group")
    flags.define("bandwidth", 0.0, "cost model: Mbit/s of each replica's port; 0: no predictions")
    flags.define("bandwidth_within", 0.0, "cost model: Mbit/s within a group; 0: as --bandwidth")
    flags.define("stage_start", 0.0, "cost model: fixed ms per stage")
    flags.define(
        "gamma",
        0.0,
        "cost model: ns of CPU time to send, receive and add a byte, if all workers share one "
        "machine",
    )
    flags.define("timeout", 300.0, "seconds after which an all-reduce fails")
    _define_samples(flags, repeats=10, warmup=2)
    counts = _parsed(flags, arguments, "repeats", "warmup")
    sizes = _numbers(flags, "sizes")
    packs = _numbers(flags, "fusion_bytes")
    named = [name for name in flags["gradients"].split(",") if name]
    algorithms = [name for name in flags["algorithms"].split(",") if name]
    if not algorithms or not sizes + named:
        raise UserError("give at least one of --algorithms, and one of --sizes or --gradients")

    import_tensorflow()
    from imagenet_fast.distribute.all_reduce import default_group_size
    from imagenet_fast.distribute.strategy import make_strategy
    from imagenet_fast.distribute.workers import is_chief
    from imagenet_fast.lab.benchmarks.all_reduce import compare as all_reduce
    from imagenet_fast.lab.benchmarks.all_reduce.report import make_report
    from imagenet_fast.lab.planning.cost_model.all_reduce import Network

    network = None
    if flags["bandwidth"]:
        network = Network(
            flags["latency_within"] / 1e3,
            flags["latency_between"] / 1e3,
            (flags["bandwidth_within"] or flags["bandwidth"]) * 1e6 / 8,
            flags["bandwidth"] * 1e6 / 8,
            flags["stage_start"] / 1e3,
            flags["gamma"] / 1e9,
        )
    # With 0, the strategy does not split the packs of the benchmark.
    strategy = make_strategy(Config(fusion_bytes=0))
    group = flags["group"] or default_group_size(strategy)
    results = all_reduce.compare_all_reduce(
        strategy,
        [*map(all_reduce.sized_case, sizes), *map(all_reduce.gradients_case, named)],
        [all_reduce.Method(name, pack, flags["dtype"]) for name in algorithms for pack in packs],
        group_size=group,
        network=network,
        timeout_seconds=flags["timeout"],
        **counts,
    )
    if is_chief(strategy):
        replicas = strategy.num_replicas_in_sync
        report = make_report(results, replicas, group)
        _print_and_write(report, flags, flags.own_names(), f"{replicas}_workers")


def _input(arguments: list[str]) -> None:
    options = ["data_dir", "num_classes", "label_offset", "image_size", "train_crop"]
    options += ["resize_method", "jpeg_index", "shuffle_buffer", "data_threads", "cache"]
    flags = CommandFlags("benchmark input", options)
    flags.define("batch_size", 64, "images in a batch")
    flags.define(
        "compare",
        "peers,bounds,stages,ablation",
        "comparisons, separated by commas; peers: other pipelines; bounds: decoding alone; stages: "
        "up to each stage; ablation: without optimizations; cached: decoded images in memory; "
        "index and evaluation: with and without JPEG indexes",
    )
    others = {
        "model_garden": "Model Garden, to time its reader, too",
        "pytorch": "PyTorch and torchvision, to time its loader, too",
        "dali": "NVIDIA DALI, to time it on the CPU, too",
        "ffcv": "FFCV, to time its loader of JPEGs, too",
        "ffcv_raw": "FFCV, to time its loader of raw pixels, too",
    }
    for name, text in others.items():
        flags.define(
            name, "", f"directory of an environment of tools/input_peers.sh that has {text}"
        )
    flags.define("images", 2000, "images in a sample; choose many batches per core")
    flags.define("consumes", 0.0, "images/s that a host's accelerators consume; 0: unknown")
    _define_samples(flags, repeats=5, warmup=1)
    counts = _parsed(flags, arguments, "images", "repeats", "warmup")
    config = Config(**{name: flags[name] for name in (*options, "batch_size")})
    names = _parts(flags, "compare", _INPUT_PARTS)

    import_tensorflow()
    from imagenet_fast.data.dataset import thread_count
    from imagenet_fast.lab.benchmarks.input.compare import InputBenchmark
    from imagenet_fast.lab.benchmarks.input.report import make_report

    peers = {name: flags[name] for name in others if flags[name]}
    benchmark = InputBenchmark(config, peers, **counts)
    parts = {name: getattr(benchmark, name)() for name in names}
    report = make_report(parts, thread_count(config), flags["consumes"])
    _print_and_write(report, flags, (*options, *flags.own_names()), "input")


def _serving(arguments: list[str]) -> None:
    flags = CommandFlags("benchmark serving", ("model_dir", "model", "data_dir"), of_run=True)
    flags.define("batch_sizes", "1,32", "images in a call of the model, separated by commas")
    flags.define(
        "images", 1000, "validation images whose predictions are compared with evaluation's"
    )
    flags.define("calls", 10, "calls of the model in a sample")
    flags.define("threads", 0, "threads of each runtime; 0: one per core")
    _define_samples(flags, repeats=10, warmup=2)
    counts = _parsed(flags, arguments, "images", "calls", "repeats", "warmup")
    batch_sizes = _numbers(flags, "batch_sizes")
    if not batch_sizes or 0 in batch_sizes:
        raise UserError(f"batch_sizes is {flags['batch_sizes']!r}, but must be positive numbers")
    if flags["threads"] < 0:
        raise UserError(f"threads is {flags['threads']}, but must not be negative")

    import_tensorflow()
    from imagenet_fast.lab.benchmarks.serving.compare import compare_serving
    from imagenet_fast.lab.benchmarks.serving.report import make_report
    from imagenet_fast.training.checkpoints.config_file import config_of_run

    config = config_of_run(flags["model_dir"], flags.changes())
    results = compare_serving(config, batch_sizes, threads=flags["threads"], **counts)
    options = (*flags.changes(), *flags.own_names())
    _print_and_write(make_report(results), flags, options, "serving")


def _pipeline(arguments: list[str]) -> None:
    flags = CommandFlags("benchmark pipeline")
    flags.define(
        "parts",
        ",".join(_PIPELINE_PARTS),
        "parts, separated by commas; "
        + "; ".join(f"{name}: {text}" for name, text in _PIPELINE_PARTS.items()),
    )
    flags.define("memory_limit", 512, "MiB that each process may allocate in part memory_limit")
    flags.define("repeats", 5, "timed steps of each, in the parts that time steps")
    flags.define("output_dir", "", "directory for tables, JSON and plot; empty: none")
    counts = _parsed(flags, arguments, "memory_limit", "repeats")
    names = _parts(flags, "parts", _PIPELINE_PARTS)

    import_tensorflow()
    from imagenet_fast.lab.benchmarks.pipeline import compare as pipeline
    from imagenet_fast.lab.benchmarks.pipeline.report import make_report

    given = dict.fromkeys(
        ("schedules", "emulated", "overlap", "recomputation"), (counts["repeats"],)
    )
    given["memory_limit"] = (counts["memory_limit"] * 2**20,)
    parts = {name: pipeline.PARTS[name](*given.get(name, ())) for name in names}
    _print_and_write(make_report(parts), flags, flags.own_names(), "pipeline")


def _parts(flags: CommandFlags, name: str, known: Collection[str]) -> list[str]:
    """Parses a comma-separated list of parts."""
    names = [part for part in flags[name].split(",") if part]
    for part in names:
        if part not in known:
            raise UserError(f"{name}: there is no part {part!r}{choices_hint(part, known)}")
    if not names:
        raise UserError(f"{name} is empty: choose from {', '.join(known)}")
    return names


def _numbers(flags: CommandFlags, name: str) -> list[int]:
    """Parses a comma-separated list of whole numbers."""
    try:
        values = [int(text) for text in flags[name].split(",") if text]
    except ValueError:
        values = [-1]
    if any(value < 0 for value in values):
        raise UserError(
            f"{name} is {flags[name]!r}, but must be whole numbers, separated by commas"
        )
    return values


def _define_samples(flags: CommandFlags, repeats: int, warmup: int) -> None:
    flags.define("repeats", repeats, "timed samples of each")
    flags.define("warmup", warmup, "untimed samples of each at the start")
    flags.define("output_dir", "", "directory for table, JSON and plot; empty: none")


def _parsed(flags: CommandFlags, arguments: list[str], *names: str) -> dict[str, int]:
    """Parses the arguments, and returns the values of flags that must be positive."""
    flags.parse(arguments)
    counts = {name: flags[name] for name in names}
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} is {value}, but must be positive")
    return counts


def _print_and_write(report: Report, flags: CommandFlags, names: Iterable[str], name: str) -> None:
    """Prints a report, and writes it to ``--output_dir`` with the values of the named flags."""
    print(report.text)
    if flags["output_dir"]:
        options = {option: flags[option] for option in names}
        print(*report.write(options, flags["output_dir"], name), sep="\n")


# The function and the description of each benchmark.
BENCHMARKS = {
    "step": (_step, "a training step of Keras applications' networks, here and under `fit`"),
    "resnet9": (_resnet9, "a step of Page's recipe against plain Keras, and its parts"),
    "optimizer": (_optimizer, "one update of a model's variables by our optimizers and others"),
    "all_reduce": (
        _all_reduce,
        "all-reduces over workers by each algorithm; start it on all workers",
    ),
    "input": (_input, "images/s of the input pipeline, by stage, and of other pipelines"),
    "pipeline": (_pipeline, "pipelines over devices: time, bubbles, memory, size of the graph"),
    "serving": (_serving, "an exported model by format: images/s, latency and memory"),
}
_PIPELINE_PARTS = {
    "estimates": "bubbles and stored activations of all schedules, simulated, without a device",
    "schedules": "step time on emulated devices, by schedule",
    "emulated": "step time on emulated devices, by stages and micro-batches",
    "overlap": "step time of two stages, each on its own core, by micro-batches",
    "recomputation": "step time of four stages on one core, by recomputation",
    "memory": "peak memory of activations, by stages and micro-batches",
    "memory_limit": "a network that exceeds the memory limit of one process, on four",
    "graphs": "size of the graph and time to build it, by micro-batches",
}
_INPUT_PARTS = ("peers", "bounds", "stages", "ablation", "cached", "index", "evaluation")


def _help() -> str:
    lines = [f"  {name:10} {text}" for name, (_, text) in BENCHMARKS.items()]
    return "\n".join(
        [
            "usage: imagenet-fast benchmark NAME [--flag=value ...]",
            "",
            *lines,
            "",
            "imagenet-fast benchmark NAME --help lists a benchmark's flags.",
        ]
    )
