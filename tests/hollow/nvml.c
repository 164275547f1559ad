/* The hollow GPU's libnvidia-ml: one device, which is in no fabric. torch 2.15 asks before it maps expandable segments. */
#define F(name) int name() { return 0; }
F(nvmlInit_v2) F(nvmlDeviceGetHandleByPciBusId_v2) F(nvmlDeviceGetComputeRunningProcesses)
F(nvmlDeviceGetNvLinkRemoteDeviceType) F(nvmlDeviceGetNvLinkRemotePciInfo_v2) F(nvmlSystemGetCudaDriverVersion_v2)
int nvmlDeviceGetGpuFabricInfoV(void *device, unsigned char *info) { info[28] = 0; return 0; } /* state: not supported */
