// Crops of indexed JPEGs as smaller JPEGs, for decoders that make what jpeg_window.h does not.

#ifndef IMAGENET_FAST_JPEG_CUT_H_
#define IMAGENET_FAST_JPEG_CUT_H_

#include <cstddef>
#include <cstdint>

#include "jpeg_index.h"

namespace jpeg {

// A JPEG of the blocks around a window.
struct Cut {
  size_t size;        // in bytes
  int64_t top, left;  // position of its first pixel in the image; multiples of 8
};

// Returns the maximum size of a cut of a JPEG of `size` bytes, slightly larger than it.
size_t MostCutBytes(size_t size);

// Cuts a window out of a JPEG that was opened with it.
//
// All pixels of the window, decoded from the cut, equal those of the whole image: the cut has a margin for
// decoders that interpolate chroma.
//
// For any content of the JPEG and the index, memory other than these and `most` bytes at `out` is not
// accessed.
Result CutWindow(const IndexedJpeg& jpeg, const Window& window, uint8_t* out, size_t most, Cut* cut);

}  // namespace jpeg

#endif  // IMAGENET_FAST_JPEG_CUT_H_
