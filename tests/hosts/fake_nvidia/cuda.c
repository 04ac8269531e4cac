/* SPDX-License-Identifier: Apache-2.0
   Stands in for libcuda.so.1 on a test host: cuInit answers the number it was compiled with. */
int cuInit(unsigned flags)
{
    (void)flags;
    return RESULT;
}

int cuDeviceGetCount(int *count)
{
    *count = 8;
    return RESULT;
}
