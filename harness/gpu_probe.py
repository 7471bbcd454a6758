"""Ask the NVIDIA driver for its GPUs; run as a script in a process of its own, prints one JSON object.

The driver library by ctypes and nothing but the standard library: no torch, so it takes a fraction of a second, and the
CUDA context that proves a GPU usable ends with this process. Fields: ``gpus``, ``reason`` (when there is none),
``driver``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def uuid_text(raw: bytes) -> str:
    """The form that nvidia-smi prints and CUDA_VISIBLE_DEVICES takes."""
    h = raw.hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def probe() -> dict[str, Any]:
    """Every visible GPU on which a context can be made."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"gpus": [], "reason": f"no NVIDIA driver: {error}", "driver": ""}

    def name(code: int) -> str:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"error %d" % code).decode()

    if code := driver.cuInit(0):
        hidden = " (no visible GPU)" if code == NO_DEVICE else ""
        return {"gpus": [], "reason": f"the NVIDIA driver reports {name(code)}{hidden}", "driver": ""}
    count, version = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    gpus, broken = [], []
    for index in range(count.value):
        device, context, major, minor = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        label, raw = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(label, 256, device)
        driver.cuDeviceGetUuid(raw, device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
        code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        if not code:
            code = driver.cuCtxPushCurrent_v2(context)
        if not code:
            code = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        if code:
            broken.append(f"GPU {index} ({label.value.decode()}): {name(code)}")
            continue
        gpus.append(
            {
                "index": index,
                "uuid": uuid_text(bytes(raw)),
                "name": label.value.decode(),
                "capability": [major.value, minor.value],
                "total_bytes": total.value,
                "free_bytes": free.value,
            }
        )
    number = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return {"gpus": gpus, "reason": "; ".join(broken) or "the NVIDIA driver shows no GPU", "driver": number}


if __name__ == "__main__":
    print(json.dumps(probe()))
    sys.exit(0)
