"""Checks the architecture in a ``.keras`` file before Keras builds it.

Keras finds classes and functions by the names in a file: it imports the modules that the file
names, and its "safe mode" refuses only some of what could run then. Here a name must be that of a
layer or of a part of one that computes and does nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras

from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.models.keras_2_config import arguments_of_keras_3

# By module. Without Lambda and others that call a function by name, layers that read vocabularies
# from files, and those that compute in loops as long as an argument says.
_CLASSES = {
    "keras": "Sequential Model Functional",
    "keras.layers": """
Activation ActivityRegularization Add AdditiveAttention AlphaDropout Attention AutoContrast Average
AveragePooling1D AveragePooling2D AveragePooling3D BatchNormalization Bidirectional CategoryEncoding
CenterCrop Concatenate Conv1D Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose
ConvLSTM1D ConvLSTM2D ConvLSTM3D Cropping1D Cropping2D Cropping3D CutMix Dense DepthwiseConv1D
DepthwiseConv2D Discretization Dot Dropout ELU EinsumDense Embedding Equalization Flatten GRU
GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D
GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GroupNormalization
GroupQueryAttention Identity InputLayer LSTM LSTMCell LayerNormalization LeakyReLU
LocallyConnected1D LocallyConnected2D Masking MaxPooling1D MaxPooling2D MaxPooling3D Maximum Minimum
MixUp MultiHeadAttention Multiply Normalization PReLU Permute RMSNormalization RNN RandomBrightness
RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop RandomErasing RandomFlip
RandomGrayscale RandomHeight RandomHue RandomInvert RandomPerspective RandomPosterization
RandomRotation RandomSaturation RandomSharpness RandomShear RandomTranslation RandomWidth RandomZoom
ReLU RepeatVector Rescaling Reshape Resizing ReversibleEmbedding SeparableConv1D SeparableConv2D
SimpleRNN SimpleRNNCell Softmax Solarization SpatialDropout1D SpatialDropout2D SpatialDropout3D
SpectralNormalization StackedRNNCells Subtract ThresholdedReLU TimeDistributed UnitNormalization
UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
""",
    "keras.initializers": """
Constant GlorotNormal GlorotUniform HeNormal HeUniform Identity LecunNormal LecunUniform Ones
Orthogonal OrthogonalInitializer RandomNormal RandomUniform TruncatedNormal VarianceScaling Zeros
""",
    "keras.regularizers": "L1 L1L2 L2 OrthogonalRegularizer",
    "keras.constraints": "MaxNorm MinMaxNorm NonNeg RadialConstraint UnitNorm",
    "keras.mixed_precision": "DTypePolicy Policy",
    # Of Keras 3, without public names.
    "keras.src.applications.convnext": "LayerScale StochasticDepth",
    "keras.src.ops.nn": """
AveragePool Celu DepthToSpace Elu Gelu HardSigmoid HardSilu HardTanh LeakyRelu LogSigmoid LogSoftmax
MaxPool Normalize Relu Relu6 Selu Sigmoid Silu Softmax Softplus Softsign SpaceToDepth
""",
    "keras.src.ops.numpy": """
Absolute Add Clip Concatenate Divide DivideNoNan Exp ExpandDims Flip GetItem Log Matmul Max Maximum
Mean Min Minimum Moveaxis Multiply Negative Pad Power Reciprocal Reshape Roll Sign Sqrt Square
Squeeze Stack Std Subtract Sum Swapaxes Tanh Transpose TrueDivide Var Where
""",
}
_NAMES = {module: frozenset(names.split()) for module, names in _CLASSES.items()}
_OPERATIONS = frozenset(module for module in _NAMES if module.startswith("keras.src."))
# Other names of initializers, regularizers and constraints, in older files.
_OTHER_NAMES = """
uniform normal zero one zeros ones constant glorot_normal glorot_uniform he_normal he_uniform
lecun_normal lecun_uniform orthogonal random_normal random_uniform truncated_normal variance_scaling
l1 l2 l1_l2 max_norm min_max_norm non_neg radial_constraint unit_norm
"""
_PART_NAMES = _NAMES["keras.initializers"] | _NAMES["keras.regularizers"]
_PART_NAMES |= _NAMES["keras.constraints"] | frozenset(_OTHER_NAMES.split())
_ACTIVATION_NAMES = """
celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu
linear log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus
softsign sparse_plus sparse_sigmoid sparsemax squareplus swish tanh tanh_shrink threshold
"""
_ACTIVATIONS = frozenset(_ACTIVATION_NAMES.split())
_BASES = (
    keras.layers.Layer,
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
)
_ARRAY_TYPES = frozenset(
    ["bool", "float16", "bfloat16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_SPEC_MODULES = ("tensorflow.python.framework.tensor", "tensorflow.python.framework.tensor_spec")
# Far above those of any network; what a small file claims must not take hours or all memory.
_DEEPEST = 64
_MOST_CALLS = 50_000
_MOST_PASSES = 200
_MOST_ITERATIONS = 1000
_LARGEST_INTEGER = 2**31


def checked_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a model's configuration without its optimizer, losses and metrics.

    Allowed are Keras' layers that only compute, their initializers, regularizers and constraints,
    and those classes of layers and of such parts that are registered with Keras in this process,
    as this package's are.

    Raises:
      ValueError: if it has anything else; the message names it.
    """
    checked, calls = _checked(config, "", 0)
    if calls > _MOST_CALLS:
        raise ValueError(f"it has more than {_MOST_CALLS:,} layers")
    if not isinstance(checked.get("class_name"), str) or "config" not in checked:
        raise ValueError("config.json describes no model")
    return checked


def _checked(value: Any, key: str, depth: int) -> tuple[Any, int]:
    """Returns a part of a configuration, and how many layers are called to make it."""
    if depth > _DEEPEST:
        raise ValueError("its configuration is nested too deeply")
    if isinstance(value, dict):
        return _checked_dict(value, depth)
    if isinstance(value, list):
        parts = [_checked(part, key, depth + 1) for part in value]
        items = [part for part, _ in parts]
        return (_Layers(items) if key == "layers" else items), sum(calls for _, calls in parts)
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER and key != "shared_object_id":
        raise ValueError(f"{key} is {value:,}")
    return value, 0


def _checked_dict(entry: dict[str, Any], depth: int) -> tuple[dict[str, Any], int]:
    names_class = "class_name" in entry
    if names_class:
        entry = _allowed(entry)
    checked, calls = {}, int(names_class)
    for key, value in entry.items():
        if key == "compile_config":
            continue
        checked[key], inside = _checked(value, key, depth + 1)
        calls += inside
    nodes = entry.get("inbound_nodes")
    if not isinstance(nodes, list) or not nodes:
        return checked, calls
    # Called on numbers instead, a layer would compute at once, whatever the size of its outputs.
    if any(isinstance(node, dict) and not _has_tensor(node) for node in nodes):
        raise ValueError(f"{str(entry.get('name'))[:100]} is called without an output of a layer")
    # A model that is called twice calls each of its layers twice.
    return checked, calls * len(nodes)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("class_name") == "__keras_tensor__" or _has_tensor([*value.values()])
    return isinstance(value, list) and any(map(_has_tensor, value))


def _allowed(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry that names a class or function by the names of the Keras that is installed.

    Raises:
      ValueError: if it is not one of those allowed.
    """
    name, config = entry["class_name"], entry.get("config")
    module, registered = entry.get("module"), entry.get("registered_name", name)
    known = all(isinstance(text, (str, type(None))) for text in (name, module, registered))
    if known and name == "function":
        known = module == "builtins" and registered == config and config in _ACTIVATIONS
    elif known and name == "__typespec__":
        known = (entry.get("spec_name"), registered) == ("TensorSpec", None)
        known = known and module in _SPEC_MODULES
    elif known and name in ("__tensor__", "__numpy__"):
        known = isinstance(config, dict) and str(config.get("dtype")) in _ARRAY_TYPES
    elif known and name not in ("__keras_tensor__", "__slice__", "__ellipsis__"):
        # Keras looks up the registered name first, whatever the others are.
        own = keras.saving.get_registered_object(registered)
        if own is not None:
            known = inspect.isclass(own) and issubclass(own, _BASES)
        else:
            entry = {**entry, **_keras_names(name, module)}
            known = entry["module"] is not None and registered in (None, name)
            if isinstance(config, dict):
                _check_names(config)
        if isinstance(config, dict):
            entry = {**entry, "config": _bounded(arguments_of_keras_3(name, config))}
    if not known:
        described = ", ".join(
            f"{key}={entry[key]!r}"[:100]
            for key in ("class_name", "module", "registered_name", "config")
            if isinstance(entry.get(key), str)
        )
        raise ValueError(
            f"it has a layer or part of one that could run any code, or is unknown here: "
            f"{described}; only Keras' layers that compute and nothing else are allowed, and those "
            "registered by keras.saving.register_keras_serializable. If you trust the file, "
            "keras.saving.load_model reads it"
        )
    return entry


def _keras_names(name: str, module: str | None) -> dict[str, Any]:
    """Returns the names of one of Keras' classes, the same from any version; module None: none."""
    places = [module] if module in _OPERATIONS else _NAMES.keys() - _OPERATIONS
    if module is not None and module.split(".")[0] not in ("keras", "tf_keras", "tensorflow"):
        places = []
    found = next((place for place in places if name in _NAMES[place]), None)
    if name == "Functional":  # which has no public name
        name = "Model"
    elif found == "keras.mixed_precision" and not KERAS_2:
        found, name = "keras", "DTypePolicy"
    return {"module": found, "class_name": name, "registered_name": None}


def _bounded(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a class's arguments without loops of Python as long as they say."""
    iterations = config.get("power_iterations", 0)
    if isinstance(iterations, int) and iterations > _MOST_ITERATIONS:
        raise ValueError(f"power_iterations is {iterations:,}")
    # Without unrolling, the results are the same.
    return {**config, "unroll": False} if config.get("unroll") else config


def _check_names(config: dict[str, Any]) -> None:
    """Raises a ValueError if an argument of one of Keras' classes names an unknown function."""
    for key, value in config.items():
        kind = key.rpartition("_")[2]
        names = {
            "activation": _ACTIVATIONS,
            "initializer": _PART_NAMES,
            "regularizer": _PART_NAMES,
            "constraint": _PART_NAMES,
        }.get(kind)
        if names and isinstance(value, str) and value not in names:
            raise ValueError(f"{key} is {value[:100]!r}, which Keras does not have")


class _Layers(list):
    """A network's layers, which Keras goes through until it has built all.

    It does so for ever if they are each other's inputs.
    """

    _passes = 0

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        if self._passes > _MOST_PASSES:
            raise ValueError("its layers need each other's outputs, so that none can be first")
        return super().__iter__()
