// Owning handles for TensorFlow's C API, and the registration of ops, for the package's native ops.
//
// The ops use the C API only, so any C++ compiler can build them: TensorFlow's C++ API would need the
// compiler and flags that built TensorFlow.

#ifndef IMAGENET_FAST_NATIVE_OPS_H_
#define IMAGENET_FAST_NATIVE_OPS_H_

#include <initializer_list>
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

inline void UnknownShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

using Specs = std::initializer_list<const char*>;

// Registers an op and its kernel for CPUs. If that fails, the library has no op, and load_ops() fails.
inline void RegisterOp(const char* name, Specs inputs, Specs outputs, Specs attributes,
                       void (*infer_shape)(TF_ShapeInferenceContext*, TF_Status*),
                       void* (*create)(TF_OpKernelConstruction*),
                       void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*)) {
  TF_OpDefinitionBuilder* const op = TF_NewOpDefinitionBuilder(name);
  for (const char* input : inputs) TF_OpDefinitionBuilderAddInput(op, input);
  for (const char* output : outputs) TF_OpDefinitionBuilderAddOutput(op, output);
  for (const char* attribute : attributes) TF_OpDefinitionBuilderAddAttr(op, attribute);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, infer_shape);
  const Status status(TF_NewStatus());
  TF_RegisterOpDefinition(op, status.get());
  if (!IsOk(status)) return;
  TF_RegisterKernelBuilder(name, TF_NewKernelBuilder(name, "CPU", create, compute, destroy),
                           status.get());
}

}  // namespace

#endif  // IMAGENET_FAST_NATIVE_OPS_H_
