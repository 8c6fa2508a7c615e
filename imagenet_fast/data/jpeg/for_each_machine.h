// Functions that are compiled for several machines.

#ifndef IMAGENET_FAST_FOR_EACH_MACHINE_H_
#define IMAGENET_FAST_FOR_EACH_MACHINE_H_

// Compiles a function for AVX2 and for the baseline; the loader picks one, before ThreadSanitizer's
// functions can be called.
#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

// Into the functions above: one of its own would be compiled for the baseline alone.
#define ALWAYS_INLINE inline __attribute__((always_inline))

#endif  // IMAGENET_FAST_FOR_EACH_MACHINE_H_
