/* vec.h: vectors of floats by one set of names, for loops that are the same at any width.
 *
 * A SIMD room defines VEC_WIDTH, the floats of a vector, before it includes this once; that tells
 * the instruction set. VEC_TARGET is its target attribute. vec_hold keeps a loaded vector in its
 * register: compilers like to fold a load into every use, and loads are what such loops run out of.
 */
#ifndef KIMI_VEC_H
#define KIMI_VEC_H

#if VEC_WIDTH == 16
#include <immintrin.h>
#define VEC_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define VEC __m512
#define vec_load _mm512_load_ps /* aligned */
#define vec_loadu _mm512_loadu_ps
#define vec_store _mm512_store_ps
#define vec_storeu _mm512_storeu_ps
#define vec_zero _mm512_setzero_ps
#define vec_splat(p) _mm512_set1_ps(*(p))
#define vec_add _mm512_add_ps
#define vec_mul _mm512_mul_ps
#define vec_fma _mm512_fmadd_ps /* a b + c */
#define vec_hold(v) __asm__("" : "+v"(v))
#elif VEC_WIDTH == 8
#include <immintrin.h>
#define VEC_TARGET __attribute__((target("avx2,fma")))
#define VEC __m256
#define vec_load _mm256_load_ps
#define vec_loadu _mm256_loadu_ps
#define vec_store _mm256_store_ps
#define vec_storeu _mm256_storeu_ps
#define vec_zero _mm256_setzero_ps
#define vec_splat _mm256_broadcast_ss
#define vec_add _mm256_add_ps
#define vec_mul _mm256_mul_ps
#define vec_fma _mm256_fmadd_ps
#define vec_hold(v) __asm__("" : "+x"(v))
#else
#include <arm_neon.h>
#define VEC_TARGET
#define VEC float32x4_t
#define vec_load vld1q_f32
#define vec_loadu vld1q_f32
#define vec_store vst1q_f32
#define vec_storeu vst1q_f32
#define vec_zero() vdupq_n_f32(0.0f)
#define vec_splat vld1q_dup_f32
#define vec_add vaddq_f32
#define vec_mul vmulq_f32
#define vec_fma(a, b, c) vfmaq_f32(c, a, b)
#define vec_hold(v) __asm__("" : "+w"(v))
#endif

#define VEC_INLINE static inline __attribute__((always_inline)) VEC_TARGET

#endif
