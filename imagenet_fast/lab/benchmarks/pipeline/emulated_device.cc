// An op that emulates work on a device: it returns its input after a given time, during which no
// other op of this kind with the same device number proceeds. It computes nothing.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "native_ops.h"

namespace {

constexpr int kDevices = 64;

void* CreateKernel(TF_OpKernelConstruction* construction) {
  const Status status(TF_NewStatus());
  auto* const device = new int64_t(0);
  TF_OpKernelConstruction_GetAttrInt64(construction, "device", device, status.get());
  if (!IsOk(status)) TF_OpKernelConstruction_Failure(construction, status.get());
  return device;
}

void DeleteKernel(void* kernel) { delete static_cast<int64_t*>(kernel); }

void Work(int64_t device, TF_OpKernelContext* context, const Status& status) {
  static std::mutex* const busy = new std::mutex[kDevices];
  const Tensor values = Input(context, 0, status);
  if (!IsOk(status)) return;
  const Tensor microseconds = Input(context, 1, status);
  if (!IsOk(status)) return;
  if (device < 0 || device >= kDevices || TF_NumDims(microseconds.get()) != 0) {
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT,
                 "device must be in [0, 64), microseconds a scalar");
    return;
  }
  std::vector<int64_t> shape;
  for (int i = 0; i < TF_NumDims(values.get()); ++i) shape.push_back(TF_Dim(values.get(), i));
  const size_t bytes = TF_TensorByteSize(values.get());
  const Tensor after(TF_AllocateOutput(context, 0, TF_FLOAT, shape.data(), shape.size(), bytes,
                                       status.get()));
  if (!IsOk(status)) return;
  {
    const std::lock_guard<std::mutex> lock(busy[device]);
    std::this_thread::sleep_for(
        std::chrono::microseconds(*static_cast<int64_t*>(TF_TensorData(microseconds.get()))));
  }
  std::memcpy(TF_TensorData(after.get()), TF_TensorData(values.get()), bytes);
}

void Compute(void* kernel, TF_OpKernelContext* context) {
  const Status status(TF_NewStatus());
  Work(*static_cast<const int64_t*>(kernel), context, status);
  if (!IsOk(status)) TF_OpKernelContext_Failure(context, status.get());
}

void InferShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* const shape = TF_NewShapeHandle();
  TF_ShapeInferenceContextGetInput(context, 0, shape, status);
  if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
  TF_DeleteShapeHandle(shape);
}

__attribute__((constructor)) void Register() {
  RegisterOp("ImagenetFastEmulatedWork", {"values: float", "microseconds: int64"}, {"after: float"},
             {"device: int"}, InferShape, CreateKernel, Compute, DeleteKernel);
}

}  // namespace
