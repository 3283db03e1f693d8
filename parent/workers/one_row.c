/* Products with few rows, computed here instead of in the BLAS that follows in LD_PRELOAD.
 *
 * A decode step multiplies a row for each stream by every weight of the model: y[m,n] = x[m,k] W[n,k]^T. Through gemm
 * a BLAS packs the whole of W for that, which costs more than the product itself. Here W is read once, by as many
 * threads as the BLAS has: they take pieces of W as they come, so that one that is not running holds nobody up. Each
 * row's attention is two small products, the second by values as they lie, y[m,n] = x[m,k] V[k,n]: those are too short
 * to wait for a thread. Other products with one row go to gemv. Everything else is passed on as it came.
 * Built by parent/workers/one_row.py where there is a C compiler; used on Linux CPU only.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
enum { MOST_ROWS = 16, LEAST_K = 32, MOST_COLUMNS = 512, PIECE = 1 << 14, SPINS = 1 << 12, MOST_THREADS = 64 };

/* Tiles whose sums stay in 16 registers: so many rows of x by so many of W, or by so many vectors of a row of V. */
enum { TILE_X = 4, TILE_W = 3, TILE_V = 2, BLOCK = 4 * TILE_W };

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
typedef float four __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

INLINE float total(lanes v) {
  four low, high;
  memcpy(&low, &v, sizeof low);
  memcpy(&high, (const char *)&v + sizeof low, sizeof high);
  low += high;
  return (low[0] + low[2]) + (low[1] + low[3]);
}

INLINE void give(const product *p, int i, int j, float sum) {
  float *y = p->y + (long)i * p->ldy + j;
  *y = p->alpha * sum + (p->beta == 0 ? 0 : p->beta * *y);
}

/* X rows of x from i on by W rows of W from j on. Each sum is made in the same order, whatever X and W are: what a row
 * gives does not depend on those beside it. Meanwhile what
 * lies from `next` on is fetched, `stride` floats for each vector. */
INLINE void tile(const product *p, int i, int j, const int X, const int W, const float *next, int stride) {
  const float *x = p->x + (long)i * p->ldx, *w = p->w + (long)j * p->ldw;
  lanes sums[TILE_X][TILE_W];
  float told[TILE_X][TILE_W];
  int a, b, at = 0;
  for (a = 0; a < X; a++)
    for (b = 0; b < W; b++) sums[a][b] = (lanes){0};
  for (; at + 8 <= p->k; at += 8) {
    lanes here[TILE_W];
    for (b = 0; b < W; b++) here[b] = *(const lanes *)(w + (long)b * p->ldw + at);
    __builtin_prefetch(next, 0, 2);
    next += stride;
    for (a = 0; a < X; a++) {
      lanes one = *(const lanes *)(x + (long)a * p->ldx + at);
      for (b = 0; b < W; b++) sums[a][b] += one * here[b];
    }
  }
#pragma GCC unroll 4
  for (a = 0; a < X; a++) {
#pragma GCC unroll 4
    for (b = 0; b < W; b++) told[a][b] = total(sums[a][b]);
  }
  for (a = 0; a < X; a++) {
    for (b = 0; b < W; b++) {
      for (int rest = at; rest < p->k; rest++)
        told[a][b] += x[(long)a * p->ldx + rest] * w[(long)b * p->ldw + rest];
      give(p, i + a, j + b, told[a][b]);
    }
  }
}

/* Rows begin to end of W, a block of them that stays in the nearest cache for all of x; each tile fetches its share of
 * the next block, which would else be waited for once all of this one is done. */
INLINE void rows(const product *p, int begin, int end) {
  const int strips = (p->m + TILE_X - 1) / TILE_X, stride = strips > 1 ? BLOCK / TILE_W * 8 / strips : 0;
  for (int j = begin; j < end; j += BLOCK) {
    const float *next = p->w + (long)(j + BLOCK) * p->ldw;
    for (int i = 0; i < p->m; i += TILE_X) {
      for (int from = j; from < j + BLOCK && from < end; from += TILE_W) {
        const int X = p->m - i < TILE_X ? p->m - i : TILE_X, W = end - from < TILE_W ? end - from : TILE_W;
        if (X == 4 && W == TILE_W) tile(p, i, from, 4, TILE_W, next, stride);
        else if (X == 3 && W == TILE_W) tile(p, i, from, 3, TILE_W, next, stride);
        else if (X == 2 && W == TILE_W) tile(p, i, from, 2, TILE_W, next, stride);
        else if (W == TILE_W) tile(p, i, from, 1, TILE_W, next, stride);
        else
          for (int one = 0; one < X; one++)
            for (int row = 0; row < W; row++) tile(p, i + one, from + row, 1, 1, next, 0);
        next += (long)stride * (p->k / 8);
      }
    }
  }
}

/* X rows of x by V vectors of the columns of V from j on. */
INLINE void columns_tile(const product *p, int i, int j, const int X, const int V) {
  const float *x = p->x + (long)i * p->ldx, *v = p->w + j;
  lanes sums[TILE_X][TILE_V];
  int a, b;
  for (a = 0; a < X; a++)
    for (b = 0; b < V; b++) sums[a][b] = (lanes){0};
  for (int at = 0; at < p->k; at++, v += p->ldw) {
    lanes here[TILE_V];
    for (b = 0; b < V; b++) here[b] = *(const lanes *)(v + 8 * b);
    for (a = 0; a < X; a++)
      for (b = 0; b < V; b++) sums[a][b] += x[(long)a * p->ldx + at] * here[b];
  }
  for (a = 0; a < X; a++)
    for (b = 0; b < V; b++)
      for (int lane = 0; lane < 8; lane++) give(p, i + a, j + 8 * b + lane, sums[a][b][lane]);
}

INLINE void columns_strip(const product *p, int i, const int X) {
  int j = 0;
  for (; j + 8 * TILE_V <= p->n; j += 8 * TILE_V) columns_tile(p, i, j, X, TILE_V);
  if (j < p->n) columns_tile(p, i, j, X, 1);
}

INLINE void columns(const product *p) {
  int i = 0;
  for (; i + 4 <= p->m; i += 4) columns_strip(p, i, 4);
  switch (p->m - i) {
    case 3: columns_strip(p, i, 3); break;
    case 2: columns_strip(p, i, 2); break;
    case 1: columns_strip(p, i, 1); break;
  }
}

typedef struct {
  void (*rows)(const product *, int begin, int end);
  void (*columns)(const product *);
} kernels;

#define KERNELS(ON, HOW)                                                                 \
  HOW static void rows##ON(const product *p, int begin, int end) { rows(p, begin, end); } \
  HOW static void columns##ON(const product *p) { columns(p); }                           \
  static const kernels with##ON = {rows##ON, columns##ON};

KERNELS(_any, )
#if defined(__x86_64__)
KERNELS(_avx2, __attribute__((target("avx2,fma"))))
#endif

/* Chosen when the library is loaded, before anybody multiplies. */
static const kernels *with = &with_any;

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) with = &with_avx2;
#endif
}

/* One product at a time has helpers; whoever comes meanwhile does its own alone. `ticket` is odd while there is work,
 * and `inside` counts the helpers that look at it. */
static product job;
static atomic_int taken, inside, busy;
static atomic_uint ticket;
static int helpers;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;

static void take_pieces(const product *p) {
  for (;;) {
    int begin = atomic_fetch_add(&taken, p->piece);
    if (begin >= p->n) return;
    with->rows(p, begin, begin + p->piece < p->n ? begin + p->piece : p->n);
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
    with->rows(&p, 0, p.n);
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
  if (order == ROW_MAJOR && trans_a == NO_TRANS && trans_b == NO_TRANS && m >= 1 && m <= MOST_ROWS && n % 8 == 0 &&
      n >= 8 && n <= MOST_COLUMNS) {
    product p = {m, n, k, lda, ldb, ldc, n, alpha, beta, a, b, c};
    with->columns(&p);
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
