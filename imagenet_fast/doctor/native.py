"""Check that the input pipeline's native resize compiles on this machine."""

from __future__ import annotations

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.data.jpeg.image_ops import with_resize_kernel
from imagenet_fast.data.options import DataOptions
from imagenet_fast.doctor.finding import Finding, ok, slow


def check_resize(_: SharedOptions) -> list[Finding]:
    """Compiles the op, unless it is compiled already."""
    try:
        with_resize_kernel(DataOptions(resize_kernel="native"))
    except UserError as error:
        reason = f"{error.__cause__ or error}"
        found = f"TensorFlow's, several times slower than the native one: {reason}"
        return [slow("resize", found, "install a C++ compiler, such as g++, or name it in CXX")]
    return [ok("resize", "the native kernel, compiled")]
