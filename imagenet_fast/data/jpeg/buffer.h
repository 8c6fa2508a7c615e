// Memory of a thread that keeps its size from one image to the next.

#ifndef IMAGENET_FAST_BUFFER_H_
#define IMAGENET_FAST_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

class Buffer {
 public:
  // Returns at least `size` bytes of any content; null if there is not enough memory.
  uint8_t* Get(size_t size) {
    if (size > size_) {
      data_.reset();
      data_.reset(new (std::nothrow) uint8_t[size]);
      size_ = data_ ? size : 0;
    }
    return data_.get();
  }

  // Frees it if it is large.
  void Release() {
    if (size_ > kKept) {
      data_.reset();
      size_ = 0;
    }
  }

 private:
  static constexpr size_t kKept = size_t{1} << 25;

  std::unique_ptr<uint8_t[]> data_;
  size_t size_ = 0;
};

#endif  // IMAGENET_FAST_BUFFER_H_
