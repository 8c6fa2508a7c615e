// Owning handles for TensorFlow's C API, for the package's native ops.
//
// The ops use the C API only, so any C++ compiler can build them: TensorFlow's C++ API would need the
// compiler and flags that built TensorFlow.

#ifndef IMAGENET_FAST_NATIVE_OPS_H_
#define IMAGENET_FAST_NATIVE_OPS_H_

#include <memory>

#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_tensor.h"

namespace {

struct Deleter {
  void operator()(TF_Status* status) const { TF_DeleteStatus(status); }
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using Status = std::unique_ptr<TF_Status, Deleter>;
using Tensor = std::unique_ptr<TF_Tensor, Deleter>;

bool IsOk(const Status& status) { return TF_GetCode(status.get()) == TF_OK; }

Tensor Input(TF_OpKernelContext* context, int index, const Status& status) {
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context, index, &tensor, status.get());
  return Tensor(tensor);
}

}  // namespace

#endif  // IMAGENET_FAST_NATIVE_OPS_H_
