"""A fixed convolution that whitens the patches of images."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute.one_call import assign_everywhere

# Elements of patches in memory at a time: 32 MiB as float64.
_CHUNK = 2**22
# Of a filter's outputs. Rounding to whole pixel values alone gives filters of photographs more.
_LEAST_VARIANCE = 1e-2


@keras.saving.register_keras_serializable("imagenet_fast")
class PatchWhitening(keras.layers.Layer):
    """Convolution whose fixed filters make the elements of image patches uncorrelated.

    The filters, one for each element of a patch, are the eigenvectors of the patches' covariance,
    by descending eigenvalue, each divided by sqrt(eigenvalue + epsilon). The defaults are those of
    Page 2019, "How to Train Your ResNet 8", for 3 x 3 patches; airbench (Jordan 2024, "94% on
    CIFAR-10 in 3.29 seconds") has ``patch_size=2, padding="valid", negatives=True,
    use_bias=True, epsilon=5e-4``.

    ``adapt`` sets the filters from images, a checkpoint restores them; before, each filter selects
    one element of the patch.

    Input: [batch, height, width, channels]. Output: [batch, height, width, filters], smaller by
    ``patch_size - 1`` in height and width with ``padding="valid"``; in the compute dtype.

    Args:
      patch_size: height and width of a patch in pixels.
      padding: ``"same"`` for zeros around the images, or ``"valid"``.
      negatives: whether to append the negatives of the filters as further filters.
      use_bias: whether to add a trainable ``bias``.
      bias_initializer: of that bias.
      epsilon: added to the eigenvalues, in squared units of the images; positive.
      **kwargs: Keras' options (``name``, ``dtype``).

    Raises:
      UserError: if an option cannot be used.
    """

    def __init__(
        self,
        patch_size: int = 3,
        *,
        padding: str = "same",
        negatives: bool = False,
        use_bias: bool = False,
        bias_initializer: Any = "zeros",
        epsilon: float = 1e-2,
        **kwargs: Any,
    ) -> None:
        if patch_size < 1:
            raise UserError(f"patch_size is {patch_size}, but must be positive")
        if padding not in ("same", "valid"):
            raise UserError(f"padding is {padding!r}, but must be 'same' or 'valid'")
        if not epsilon > 0:
            raise UserError(f"epsilon is {epsilon}, but must be positive")
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.padding = padding
        self.negatives = negatives
        self.use_bias = use_bias
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.epsilon = epsilon

    def build(self, input_shape: Any) -> None:
        """Makes the kernel: [patch_size, patch_size, channels, filters]; and a bias: [filters]."""
        kernel = self._kernel_of(np.eye(self.patch_size**2 * input_shape[-1]))
        self.kernel = self.add_weight(
            name="kernel",
            shape=kernel.shape,
            initializer=lambda shape, dtype=None: tf.constant(kernel, dtype, shape),
            trainable=False,
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias", shape=kernel.shape[-1:], initializer=self.bias_initializer
            )
        super().build(input_shape)

    def adapt(self, images: np.ndarray | tf.Tensor) -> None:
        """Sets the filters that whiten the patches of ``images``, in cross-replica context.

        The biases of filters whose outputs do not vary, as those of differences of colours in grey
        images, become 0 and are not trained. Their outputs are rounding errors, which a batch norm
        with a tiny epsilon, as airbench's, enlarges together with the biases' gradients.

        Images are float [count, height, width, channels], normalized like the layer's inputs.

        Raises:
          UserError: if ``patch_covariance`` refuses these images, or the layer was built for
            another number of channels.
        """
        covariance = patch_covariance(images, self.patch_size)
        if not self.built:
            self(images[:1])
        if images.shape[-1] != self.kernel.shape[2]:
            raise UserError(
                f"{self.name} takes images of {self.kernel.shape[2]} channels, "
                f"but got images of {images.shape[-1]} to adapt to"
            )
        kernel = self._kernel_of(whitening_filters(covariance, self.epsilon))
        assign_everywhere([self.kernel], [kernel])
        if self.bias is not None:
            bias = np.where(self._outputs_vary(kernel), self.bias.numpy(), 0)
            assign_everywhere([self.bias], [bias])

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Convolves a batch with the filters."""
        outputs = tf.nn.conv2d(inputs, self.kernel, strides=1, padding=self.padding.upper())
        if self.bias is None:
            return outputs
        trained = tf.cast(self._outputs_vary(self.kernel), outputs.dtype)
        bias = tf.cast(self.bias, outputs.dtype)
        return tf.nn.bias_add(outputs, trained * bias + tf.stop_gradient((1 - trained) * bias))

    def get_build_config(self) -> None:
        """Defers building to the first call, which names the weights after the layer."""

    def get_config(self) -> dict[str, Any]:
        """Returns all options, for saving."""
        return {
            **super().get_config(),
            "patch_size": self.patch_size,
            "padding": self.padding,
            "negatives": self.negatives,
            "use_bias": self.use_bias,
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "epsilon": self.epsilon,
        }

    def _outputs_vary(self, kernel: np.ndarray | tf.Tensor) -> tf.Tensor:
        """Returns for each filter, [filters], whether its outputs vary more than rounding errors.

        A filter's squared length is 1 / (eigenvalue + epsilon), and the variance of its outputs is
        eigenvalue / (eigenvalue + epsilon).
        """
        squares = tf.reduce_sum(tf.cast(kernel, "float32") ** 2, axis=[0, 1, 2])
        return self.epsilon * squares < 1 - _LEAST_VARIANCE

    def _kernel_of(self, filters: np.ndarray) -> np.ndarray:
        """Returns the convolution's kernel; each column of ``filters`` is one filter."""
        if self.negatives:
            filters = np.concatenate([filters, -filters], axis=1)
        return filters.reshape(self.patch_size, self.patch_size, -1, filters.shape[1])


def patch_covariance(images: np.ndarray | tf.Tensor, patch_size: int) -> np.ndarray:
    """Returns the covariance of the elements of all patches inside the images.

    The mean is not subtracted (Page 2019, airbench), and the sum is divided by the number of
    patches, as in airbench; Page divides by one less. Processes a few images at a time, in float64.

    Args:
      images: float [count, height, width, channels].
      patch_size: height and width of a patch in pixels.

    Returns:
      float64 [elements, elements]; the elements of a patch are in the order of a convolution's
      kernel, [patch_size, patch_size, channels].

    Raises:
      UserError: if there are no such patches, or the images are not normalized floats.
    """
    if len(images.shape) != 4 or 0 in images.shape or min(images.shape[1:3]) < patch_size:
        raise UserError(
            f"got images of shape {tuple(images.shape)}, but need [count, height, width, channels] "
            f"with height and width of at least {patch_size}, the size of the patches to whiten"
        )
    if not tf.as_dtype(images.dtype).is_floating:
        raise UserError(
            f"got images of dtype {tf.as_dtype(images.dtype).name} to whiten; normalize them first"
        )
    count, height, width, channels = images.shape
    height, width = height - patch_size + 1, width - patch_size + 1
    elements = patch_size**2 * channels
    chunk = max(1, _CHUNK // (height * width * elements))
    total = np.zeros([elements, elements])
    for start in range(0, count, chunk):
        part = np.asarray(images[start : start + chunk]).astype("float64")
        shifted = [
            part[:, row : row + height, column : column + width]
            for row in range(patch_size)
            for column in range(patch_size)
        ]
        patches = np.concatenate(shifted, axis=-1).reshape(-1, elements)
        total += patches.T @ patches
    if not np.isfinite(total).all():
        raise UserError("the images to whiten contain NaN or infinite numbers; check their source")
    return total / (count * height * width)


def whitening_filters(covariance: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns the filters that whiten data with this covariance, up to ``epsilon``.

    The outputs of filter i have the variance ``eigenvalue_i / (eigenvalue_i + epsilon)``, and no
    covariance with those of others. The largest element of each filter is positive.

    Args:
      covariance: [elements, elements], symmetric.
      epsilon: added to the eigenvalues, positive.

    Returns:
      [elements, filters], by descending eigenvalue.
    """
    eigenvalues, vectors = np.linalg.eigh(covariance)
    eigenvalues, vectors = eigenvalues[::-1], vectors[:, ::-1]
    # Opposite elements of a symmetric filter are equal up to rounding: use the first of them.
    sizes = np.abs(vectors)
    largest = np.argmax(sizes > 0.999 * sizes.max(axis=0), axis=0)
    signs = np.sign(np.take_along_axis(vectors, largest[np.newaxis], axis=0))
    # Rounding may make an eigenvalue of 0 negative.
    return signs * vectors / np.sqrt(np.maximum(eigenvalues, 0) + epsilon)
