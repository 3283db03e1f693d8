/* Products with few rows, computed here instead of in the BLAS that follows in LD_PRELOAD.
 *
 * A decode step multiplies a row for each stream by every weight of the model: y[m,n] = x[m,k] W[n,k]^T. Through gemm
 * a BLAS packs the whole of W for that, which costs more than the product itself. Here W is read once, a row of it
 * at a time for eight rows of x, by as many threads as the BLAS has: they take pieces of W as they come, so that one that
 * is not running holds nobody up. Other products with one row go to gemv. Everything else is passed on as it came.
 * Built by parent/workers/one_row.py where there is a C compiler; used on Linux CPU only.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
enum { AT_ONCE = 8, MOST_ROWS = 16, LEAST_K = 128, PIECE = 1 << 14, SPINS = 1 << 12, MOST_THREADS = 64 };

typedef void (*sgemm_fn)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *,
                         int);
typedef void (*sgemv_fn)(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

static sgemm_fn next_sgemm;
static sgemv_fn next_sgemv;

__attribute__((constructor)) static void find_next(void) {
  next_sgemm = (sgemm_fn)dlsym(RTLD_NEXT, "cblas_sgemm");
  next_sgemv = (sgemv_fn)dlsym(RTLD_NEXT, "cblas_sgemv");
}

typedef struct {
  int m, n, k, ldx, ldw, ldy, piece; /* piece: rows of W that are taken at a time */
  float alpha, beta;
  const float *x, *w;
  float *y;
} product;

typedef float lanes __attribute__((vector_size(32), aligned(4)));

/* Rows begin to end of W against M rows of x; M is known to the compiler, so the sums stay in registers. */
#define KERNEL(M, ON, HOW)                                                                                                   \
  HOW static void rows_##M##ON(const product *p, int begin, int end) {                                                  \
    for (int j = begin; j < end; j++) {                                                                                \
      const float *w = p->w + (long)j * p->ldw;                                                                        \
      lanes sums[M];                                                                                                   \
      int i, lane, at = 0;                                                                                             \
      for (i = 0; i < M; i++) sums[i] = (lanes){0};                                                                    \
      for (; at + 8 <= p->k; at += 8) {                                                                                \
        lanes here = *(const lanes *)(w + at);                                                                         \
        for (i = 0; i < M; i++) sums[i] += here * *(const lanes *)(p->x + (long)i * p->ldx + at);                      \
      }                                                                                                                \
      for (i = 0; i < M; i++) {                                                                                        \
        const float *x = p->x + (long)i * p->ldx;                                                                      \
        float sum = 0, *y = p->y + (long)i * p->ldy + j;                                                               \
        for (lane = 0; lane < 8; lane++) sum += sums[i][lane];                                                         \
        for (lane = at; lane < p->k; lane++) sum += w[lane] * x[lane];                                                 \
        *y = p->alpha * sum + (p->beta == 0 ? 0 : p->beta * *y);                                                       \
      }                                                                                                                \
    }                                                                                                                  \
  }

#define KERNELS(ON, HOW)                                                                                               \
  KERNEL(1, ON, HOW)                                                                                                   \
  KERNEL(2, ON, HOW)                                                                                                   \
  KERNEL(3, ON, HOW)                                                                                                   \
  KERNEL(4, ON, HOW)                                                                                                   \
  KERNEL(5, ON, HOW)                                                                                                   \
  KERNEL(6, ON, HOW)                                                                                                   \
  KERNEL(7, ON, HOW)                                                                                                   \
  KERNEL(8, ON, HOW)                                                                                                   \
  static const kernel kernels##ON[AT_ONCE + 1] = {                                                                     \
      0, rows_1##ON, rows_2##ON, rows_3##ON, rows_4##ON, rows_5##ON, rows_6##ON, rows_7##ON, rows_8##ON};

typedef void (*kernel)(const product *, int, int);

KERNELS(_any, )
#if defined(__x86_64__)
KERNELS(_avx2, __attribute__((target("avx2,fma"))))
#endif

static const kernel *kernels = kernels_any;

/* One product at a time has helpers; whoever comes meanwhile does its own alone. `ticket` is odd while there is work,
 * and `inside` counts the helpers that look at it. */
static product job;
static atomic_int taken, inside, busy;
static atomic_uint ticket;
static int helpers;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;

/* More rows of x than the registers hold go in two passes: a piece of W is in the cache by the second. */
static void rows_of(const product *p, int begin, int end) {
  product half = *p;
  if (p->m > AT_ONCE) {
    half.m = p->m - AT_ONCE;
    kernels[half.m](&half, begin, end);
    half.x += (long)half.m * p->ldx;
    half.y += (long)half.m * p->ldy;
    half.m = AT_ONCE;
  }
  kernels[half.m](&half, begin, end);
}

static void take_pieces(const product *p) {
  for (;;) {
    int begin = atomic_fetch_add(&taken, p->piece);
    if (begin >= p->n) return;
    rows_of(p, begin, begin + p->piece < p->n ? begin + p->piece : p->n);
  }
}

static void *help(void *unused) {
  unsigned seen = 0;
  for (;;) {
    for (int spin = 0; spin < SPINS && atomic_load(&ticket) == seen; spin++) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    if (atomic_load(&ticket) == seen) {
      pthread_mutex_lock(&lock);
      while (atomic_load(&ticket) == seen) pthread_cond_wait(&work, &lock);
      pthread_mutex_unlock(&lock);
    }
    atomic_fetch_add(&inside, 1);
    seen = atomic_load(&ticket);
    if (seen & 1) take_pieces(&job);
    atomic_fetch_sub(&inside, 1);
  }
  return unused;
}

static void start_up(void) {
  const char *asked = getenv("OPENBLAS_NUM_THREADS");
  cpu_set_t cpus;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels = kernels_avx2;
#endif
  int count = asked ? atoi(asked) : 0;
  if (count < 1) count = sched_getaffinity(0, sizeof cpus, &cpus) ? 1 : CPU_COUNT(&cpus);
  if (count > MOST_THREADS) count = MOST_THREADS;
  for (pthread_t thread; helpers < count - 1; helpers++) {
    if (pthread_create(&thread, 0, help, 0)) break;
    pthread_detach(thread);
  }
}

static void multiply(product p) {
  int none = 0;
  pthread_once(&once, start_up);
  if (!helpers || (long)p.n * p.k < 4 * PIECE || !atomic_compare_exchange_strong(&busy, &none, 1)) {
    rows_of(&p, 0, p.n);
    return;
  }
  p.piece = PIECE / p.k > 4 ? PIECE / p.k : 4;
  job = p;
  atomic_store(&taken, 0);
  pthread_mutex_lock(&lock);
  atomic_fetch_add(&ticket, 1);
  pthread_cond_broadcast(&work);
  pthread_mutex_unlock(&lock);
  take_pieces(&p);
  atomic_fetch_add(&ticket, 1); /* even: nobody begins any more */
  while (atomic_load(&inside)) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  atomic_store(&busy, 0);
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  if (order == ROW_MAJOR && trans_a == NO_TRANS && trans_b == TRANS && m >= 1 && m <= MOST_ROWS && k >= LEAST_K) {
    multiply((product){m, n, k, lda, ldb, ldc, n, alpha, beta, a, b, c});
    return;
  }
  if (m == 1 && order == ROW_MAJOR && next_sgemv && n > 0 && k > 0) {
    int step = trans_a == NO_TRANS ? 1 : lda; /* the row may be a column of a wider matrix */
    if (trans_b == TRANS) { /* B is [n, k] */
      next_sgemv(order, NO_TRANS, n, k, alpha, b, ldb, a, step, beta, c, 1);
      return;
    }
    if (trans_b == NO_TRANS) { /* B is [k, n] */
      next_sgemv(order, TRANS, k, n, alpha, b, ldb, a, step, beta, c, 1);
      return;
    }
  }
  next_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
