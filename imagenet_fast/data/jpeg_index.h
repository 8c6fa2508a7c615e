// An index of a JPEG, and smaller JPEGs that it lets one cut out without decoding a pixel.
//
// A decoder must read a baseline JPEG's bits from the first one on: codes have no fixed length, and each
// block's DC coefficient is stored as the difference from the block before. The index holds the position
// in the file and the DC coefficients every few blocks, so that the blocks around a window can be found and
// copied into a JPEG of their own, from which any decoder makes the same pixels as from the whole one.
//
// The index, in which integers are little-endian and a "varint" has 7 bits a byte, the lowest first, and
// the highest bit set in all bytes but the last:
//
//   1 byte    version, 1
//   1 byte    spacing: MCUs (minimum coded units) from one point of a row to the next
//   4 bytes   length of the JPEG in bytes
//   4 bytes   hash of the JPEG: FNV-1a, 32 bits, of its segments SOF0 or SOF1, DHT, DQT, APP0 and APP14, in
//             their order and from the marker on, and then of 64 pieces of 8 bytes, spread evenly over the
//             file from its first byte to its last
//   points    one at every `spacing` MCUs of each row of MCUs, at the row's end, at each restart marker and
//             at the end of the scan, in the order of the MCUs. Each is
//               varint    bits from the last point, or from the begin of the scan, to the MCU behind this
//                         point; behind a restart marker, from the first bit behind that marker. Bytes of 0
//                         that are stuffed behind bytes of 255 count
//               varints   for each component the DC coefficient before the MCU, less that of the last point
//                         (0 at the begin and behind a restart marker), times 2, or times -2 minus 1
//   4 bytes   hash of all bytes before
//
// JPEGs have an index if they are sequential, Huffman-coded, of 8 bits, grey or of 3 components, and one
// scan.

#ifndef IMAGENET_FAST_JPEG_INDEX_H_
#define IMAGENET_FAST_JPEG_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jpeg_index {

struct Bytes {
  const uint8_t* data;
  size_t size;
};

enum class Result {
  kOk,
  kUnsupported,  // the JPEG is of another kind
  kCorrupt,      // it is damaged or cut short
  kBadIndex,     // the index is damaged, or that of another JPEG
  kBadWindow,    // the window is empty, or not inside the image
  kNoRoom,       // the cut is larger than allowed
};

// In pixels.
struct Window {
  int64_t top, left, height, width;
};

// Makes the index of a JPEG.
Result MakeIndex(Bytes jpeg, std::vector<uint8_t>* index);

// A JPEG of the blocks around a window.
struct Cut {
  size_t size;        // in bytes
  int64_t top, left;  // where in the image it begins, in pixels; multiples of 8
};

// The most bytes that a cut of a JPEG of `size` bytes may take: a few more than it has.
size_t MostCutBytes(size_t size);

// Cuts a window out of a JPEG.
//
// Where the cut is decoded at 1/scale of its size (1, 2, 4 or 8), all pixels of the window, its edges rounded
// to the nearest, are equal to those of the whole image decoded in the same way: there is a margin,
// where decoders look at neighbours to enlarge the colours.
//
// Whatever the bytes of the JPEG and of the index are, nothing but these, and `most` bytes at `out`, is
// touched.
Result CutWindow(Bytes jpeg, Bytes index, const Window& window, int scale, uint8_t* out, size_t most,
                 Cut* cut);

}  // namespace jpeg_index

#endif  // IMAGENET_FAST_JPEG_INDEX_H_
