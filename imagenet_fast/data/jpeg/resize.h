// Resizing of a uint8 image to a uint8 square, optionally flipped left to right.
//
// It computes what TensorFlow's ResizeBilinear and ResizeBicubic compute with half_pixel_centers, or
// its ScaleAndTranslate with antialiasing, followed by rounding. The floating-point operations and
// their order are TensorFlow's, so pixels are bit-equal; a row at a time, which compilers vectorize.

#ifndef IMAGENET_FAST_RESIZE_H_
#define IMAGENET_FAST_RESIZE_H_

#include <cstddef>
#include <cstdint>

namespace resize {

constexpr int kColors = 3;

// Pixels of three colors, from the top left one.
struct Image {
  const uint8_t* pixels;
  int height;
  int width;
  int row_pixels;  // from one row to the next: more than the width in part of a larger image

  const uint8_t* row(int y) const {
    return pixels + static_cast<size_t>(y) * row_pixels * kColors;
  }
};

// Writes size * size pixels.
typedef void Function(const Image& image, int size, bool flipped, uint8_t* out);

// Returns the function for "bilinear" or "bicubic".
Function* ForMethod(const char* method, bool antialias);

}  // namespace resize

#endif  // IMAGENET_FAST_RESIZE_H_
