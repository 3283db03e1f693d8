/* Products with one row, sent to the matrix-vector routine of the BLAS that follows in LD_PRELOAD.
 *
 * A decode step multiplies one row by every weight of the model: y[1,n] = x[1,k] op(B). Through gemm a BLAS packs
 * the whole of B for that, which costs more than the product itself; gemv reads B once. Everything else is passed
 * on as it came. Built by parent/workers/one_row.py where there is a C compiler; used on Linux CPU only.
 */
#define _GNU_SOURCE
#include <dlfcn.h>

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

typedef void (*sgemm_fn)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *,
                         int);
typedef void (*sgemv_fn)(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

static sgemm_fn next_sgemm;
static sgemv_fn next_sgemv;

__attribute__((constructor)) static void find_next(void) {
  next_sgemm = (sgemm_fn)dlsym(RTLD_NEXT, "cblas_sgemm");
  next_sgemv = (sgemv_fn)dlsym(RTLD_NEXT, "cblas_sgemv");
}

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
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
