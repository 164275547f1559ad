/* The hollow GPU's cuBLAS, cublasLt and cuFFT: every call succeeds and computes nothing. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static char handle[64];

int cublasCreate_v2(void **made) { *made = malloc(64); return 0; }  // each thread has a handle, and a workspace, of its own
int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { *made = handle; return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = handle; return 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long rows, unsigned long cols, long ld) { *made = handle; return 0; }
size_t cublasLtGetVersion(void) { return 130200; }

struct Heuristic { unsigned long algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int asked, struct Heuristic *found, int *count) {
  memset(found, 0, sizeof *found);
  *count = 1;
  return 0;
}

#define F(name) int cublas##name(void) { return 0; }
F(Caxpy_v2) F(Ccopy_v2) F(Cdotc_v2) F(Cdotu_v2) F(CgelsBatched) F(CgemmBatched) F(CgemmStridedBatched) F(Cgemm_v2)
F(Cgemv_v2) F(CgeqrfBatched) F(Cgerc_v2) F(Cgeru_v2) F(CgetrfBatched) F(CgetrsBatched) F(Chemm_v2) F(Chemv_v2)
F(Cher2_v2) F(Cher2k_v2) F(Cher_v2) F(Cherk_v2) F(Crot_v2) F(Crotg_v2) F(Cscal_v2) F(Csrot_v2) F(Csscal_v2)
F(Cswap_v2) F(Csymm_v2) F(Csymv_v2) F(Csyr2_v2) F(Csyr2k_v2) F(Csyr_v2) F(Csyrk_v2) F(Ctrmm_v2) F(Ctrmv_v2)
F(CtrsmBatched) F(Ctrsm_v2) F(Ctrsv_v2) F(Dasum_v2) F(Daxpy_v2) F(Dcopy_v2) F(Ddot_v2) F(Destroy_v2) F(DgelsBatched)
F(DgemmBatched) F(DgemmStridedBatched) F(Dgemm_v2) F(Dgemv_v2) F(DgeqrfBatched) F(Dger_v2) F(DgetrfBatched)
F(DgetrsBatched) F(Dnrm2_v2) F(DotEx) F(Drot_v2) F(Drotg_v2) F(Drotm_v2) F(Drotmg_v2) F(Dscal_v2) F(Dswap_v2)
F(Dsymm_v2) F(Dsymv_v2) F(Dsyr2_v2) F(Dsyr2k_v2) F(Dsyr_v2) F(Dsyrk_v2) F(Dtrmm_v2) F(Dtrmv_v2) F(DtrsmBatched)
F(Dtrsm_v2) F(Dtrsv_v2) F(Dzasum_v2) F(Dznrm2_v2) F(GemmEx) F(GemmStridedBatchedEx) F(GetMatrixAsync)
F(GetVectorAsync) F(Icamax_v2) F(Icamin_v2) F(Idamax_v2) F(Idamin_v2) F(Isamax_v2) F(Isamin_v2) F(Izamax_v2)
F(Izamin_v2) F(LtMatmul) F(LtMatmulAlgoCheck) F(LtMatmulAlgoConfigGetAttribute) F(LtMatmulAlgoConfigSetAttribute)
F(LtMatmulAlgoInit) F(LtMatmulDescDestroy) F(LtMatmulDescSetAttribute) F(LtMatmulPreferenceDestroy)
F(LtMatmulPreferenceSetAttribute) F(LtMatrixLayoutDestroy) F(LtMatrixLayoutSetAttribute) F(Sasum_v2) F(Saxpy_v2)
F(Scasum_v2) F(Scnrm2_v2) F(Scopy_v2) F(Sdot_v2) F(SetMathMode) F(SetMatrixAsync) F(SetPointerMode_v2)
F(SetSmCountTarget) F(SetStream_v2) F(SetVectorAsync) F(SetWorkspace_v2) F(SgelsBatched) F(SgemmBatched) F(SgemmEx)
F(SgemmStridedBatched) F(Sgemm_v2) F(Sgemv_v2) F(SgeqrfBatched) F(Sger_v2) F(SgetrfBatched) F(SgetrsBatched)
F(Snrm2_v2) F(Srot_v2) F(Srotg_v2) F(Srotm_v2) F(Srotmg_v2) F(Sscal_v2) F(Sswap_v2) F(Ssymm_v2) F(Ssymv_v2)
F(Ssyr2_v2) F(Ssyr2k_v2) F(Ssyr_v2) F(Ssyrk_v2) F(Strmm_v2) F(Strmv_v2) F(StrsmBatched) F(Strsm_v2) F(Strsv_v2)
F(Zaxpy_v2) F(Zcopy_v2) F(Zdotc_v2) F(Zdotu_v2) F(Zdrot_v2) F(Zdscal_v2) F(ZgelsBatched) F(ZgemmBatched)
F(ZgemmStridedBatched) F(Zgemm_v2) F(Zgemv_v2) F(ZgeqrfBatched) F(Zgerc_v2) F(Zgeru_v2) F(ZgetrfBatched)
F(ZgetrsBatched) F(Zhemm_v2) F(Zhemv_v2) F(Zher2_v2) F(Zher2k_v2) F(Zher_v2) F(Zherk_v2) F(Zrot_v2) F(Zrotg_v2)
F(Zscal_v2) F(Zswap_v2) F(Zsymm_v2) F(Zsymv_v2) F(Zsyr2_v2) F(Zsyr2k_v2) F(Zsyr_v2) F(Zsyrk_v2) F(Ztrmm_v2)
F(Ztrmv_v2) F(ZtrsmBatched) F(Ztrsm_v2) F(Ztrsv_v2)

/* And its cuFFT, whose plans need no memory to work in. */
int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *ni, long long is, long long id, int it, long long *no,
                        long long os, long long od, int ot, long long batch, size_t *workspace, int type) { *workspace = 0; return 0; }
int cufftCreate(int *plan) { *plan = 1; return 0; }
#define G(name) int cufft##name(void) { return 0; }
G(Destroy) G(SetAutoAllocation) G(SetStream) G(SetWorkArea) G(XtExec)
