// For functions that must be compiled into their callers, so that what they change can stay in registers.

#ifndef IMAGENET_FAST_ALWAYS_INLINE_H_
#define IMAGENET_FAST_ALWAYS_INLINE_H_

#define ALWAYS_INLINE inline __attribute__((always_inline))

#endif  // IMAGENET_FAST_ALWAYS_INLINE_H_
