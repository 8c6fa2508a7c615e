// The pixels of a window of an indexed JPEG: only the blocks around it are decoded.
//
// They equal those that libjpeg-turbo makes of the whole image with its accurate integer DCT and its smooth
// ("fancy") upsampling of chroma; the arithmetic is that of integers, so each step is exact. What is rare is
// left to it: see kUnsupported.

#ifndef IMAGENET_FAST_JPEG_WINDOW_H_
#define IMAGENET_FAST_JPEG_WINDOW_H_

#include <cstdint>

#include "buffer.h"
#include "jpeg_index.h"

namespace jpeg {

// Decodes a window of a JPEG that was opened with it to uint8 [height, width, 3], RGB.
//
// Args:
//   planes: memory for the components' samples.
//   pixels: [window.height * window.width * 3].
//
// Returns kUnsupported for other images than greyscale and YCbCr with chroma as fine as luma, or half as fine
// in width or in both directions; for 16-bit quantization tables; for coefficients that no image of 8 bits
// has, which overflow libjpeg-turbo's vectors of 16 bits; and for windows of 2**29 samples.
Result DecodeWindow(const IndexedJpeg& jpeg, const Window& window, Buffer* planes, uint8_t* pixels);

}  // namespace jpeg

#endif  // IMAGENET_FAST_JPEG_WINDOW_H_
