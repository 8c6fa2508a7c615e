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

# Without Lambda, layers of TensorFlow's functions (TFOpLambda and the like), and those that read
# vocabularies from files.
_LAYERS = """
Activation ActivityRegularization Add AdditiveAttention AlphaDropout Attention Average
AveragePooling1D AveragePooling2D AveragePooling3D BatchNormalization Bidirectional CenterCrop
Concatenate Conv1D Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose Cropping1D
Cropping2D Cropping3D Dense DepthwiseConv1D DepthwiseConv2D Dot Dropout ELU EinsumDense Embedding
Flatten GRU GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D
GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GroupNormalization
Identity InputLayer LSTM LSTMCell LayerNormalization LeakyReLU LocallyConnected1D LocallyConnected2D
Masking MaxPooling1D MaxPooling2D MaxPooling3D Maximum Minimum MultiHeadAttention Multiply
Normalization PReLU Permute RNN RandomBrightness RandomContrast RandomCrop RandomFlip RandomHeight
RandomRotation RandomTranslation RandomWidth RandomZoom ReLU RepeatVector Rescaling Reshape Resizing
SeparableConv1D SeparableConv2D SimpleRNN SimpleRNNCell Softmax SpatialDropout1D SpatialDropout2D
SpatialDropout3D SpectralNormalization StackedRNNCells Subtract ThresholdedReLU TimeDistributed
UnitNormalization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
"""
_PARTS = """
Constant GlorotNormal GlorotUniform HeNormal HeUniform LecunNormal LecunUniform Ones
Orthogonal RandomNormal RandomUniform TruncatedNormal VarianceScaling Zeros
L1 L1L2 L2 OrthogonalRegularizer MaxNorm MinMaxNorm NonNeg RadialConstraint UnitNorm Policy
"""
_ACTIVATION_NAMES = """
elu exponential gelu hard_sigmoid linear mish relu selu sigmoid softmax softplus softsign swish tanh
"""
# For parts that older files name without a class.
_SHORT_PART_NAMES = """
uniform normal zero one zeros ones constant glorot_normal glorot_uniform he_normal he_uniform
lecun_normal lecun_uniform orthogonal random_normal random_uniform truncated_normal variance_scaling
l1 l2 l1_l2 max_norm min_max_norm non_neg radial_constraint unit_norm
"""
# As Keras 2 writes them; tf_keras also puts "tf_" before.
_MODULE_NAMES = """
keras keras.layers keras.models keras.initializers keras.regularizers keras.constraints
keras.mixed_precision keras.engine.functional keras.engine.sequential keras.src.engine.functional
keras.src.engine.sequential
"""
_CLASSES = frozenset(f"{_LAYERS} {_PARTS} Functional Model Sequential".split())
_ACTIVATIONS = frozenset(_ACTIVATION_NAMES.split())
_PART_NAMES = frozenset(f"{_PARTS} {_SHORT_PART_NAMES}".split())
_MODULES = frozenset(_MODULE_NAMES.split())
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
_LARGEST_INTEGER = 2**31


def checked_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a model's configuration without its optimizer, losses and metrics.

    Allowed are Keras' layers that only compute, their initializers, regularizers and constraints,
    and those classes of layers and of such parts that are registered with Keras in this process,
    as this package's are.

    Args:
      config: as in ``config.json`` of a ``.keras`` file.

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
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise ValueError(f"{key} is {value:,}")
    return value, 0


def _checked_dict(entry: dict[str, Any], depth: int) -> tuple[dict[str, Any], int]:
    names_class = "class_name" in entry
    if names_class:
        _check_class(entry)
    checked, calls = {}, int(names_class)
    for key, value in entry.items():
        if key == "compile_config":
            continue
        checked[key], inside = _checked(value, key, depth + 1)
        calls += inside
    nodes = entry.get("inbound_nodes")
    # A model that is called twice calls each of its layers twice.
    return checked, calls * (len(nodes) if isinstance(nodes, list) and nodes else 1)


def _check_class(entry: dict[str, Any]) -> None:
    """Raises a ValueError if an entry's class or function is not one of those allowed."""
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
    elif known:
        # Keras looks up the registered name first, whatever the others are.
        own = keras.saving.get_registered_object(registered)
        if own is not None:
            known = inspect.isclass(own) and issubclass(own, _BASES)
        else:
            plain = module is None or module.removeprefix("tf_") in _MODULES
            known = name in _CLASSES and plain
            if isinstance(config, dict):
                _check_names(config)
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
            "tf_keras.models.load_model reads it"
        )


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
