/* The hollow GPU's libcuda: every call of the driver succeeds. */
#define F(name) int name() { return 0; }
F(cuCtxGetCurrent) F(cuCtxSetCurrent) F(cuDeviceGet) F(cuDeviceGetAttribute) F(cuDevicePrimaryCtxRetain)
F(cuFuncGetAttribute) F(cuFuncSetAttribute) F(cuFuncSetCacheConfig) F(cuLaunchCooperativeKernel) F(cuLaunchKernel)
F(cuLinkAddData_v2) F(cuLinkComplete) F(cuLinkCreate_v2) F(cuModuleGetFunction) F(cuModuleLoad) F(cuModuleLoadData)
F(cuModuleLoadDataEx) F(cuModuleUnload) F(cuOccupancyMaxActiveBlocksPerMultiprocessor) F(cuPointerGetAttribute)
F(cuTensorMapEncodeTiled)
int cuDevicePrimaryCtxGetState(int d, unsigned*f, int*a){*f=0;*a=1;return 0;}
int cuGetErrorString(int e,const char**s){*s="hollow";return 0;}
int cuInit(unsigned f){return 0;}
int cuDriverGetVersion(int*v){*v=13020;return 0;}
