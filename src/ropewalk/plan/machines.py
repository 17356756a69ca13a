"""Machines by name, as data: memory, bandwidth and peak arithmetic as their vendors print them, with the source.

Memory is what the data sheet says, taken as powers of 1,000 (the devices have up to 7 % more); None where it depends on
what is installed. Arithmetic is dense (without sparsity), in operations a second, a multiplication and an addition
counting as two; on consumer cards that of 16 bits is the rate with 32-bit accumulation. For server CPUs it is cores ·
base frequency · operations per cycle of a core, and bandwidth is channels · rate · 8 bytes, both of one socket: cores,
frequency and memory are from the source, operations per cycle follow from the width and number of a core's vector or
matrix units. Apple tells the bandwidth of its chips (of several versions, that of the widest is here) and arithmetic of
the M1 alone, whose bandwidth is that of 128 bits at 4,266 million transfers a second.
"""

from __future__ import annotations

from collections.abc import Mapping

from ropewalk.plan.machine import Machine

T, GB = 1e12, 10**9
_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
_B200 = "https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet"
_L4 = "https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet"
_L40S = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_GB202 = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_MI300X = "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf"
_APPLE = "https://www.apple.com/newsroom/"
_M1_PRO = _APPLE + "2021/10/introducing-m1-pro-and-m1-max-the-most-powerful-chips-apple-has-ever-built/"
_M1_ULTRA = _APPLE + "2022/03/apple-unveils-m1-ultra-the-worlds-most-powerful-chip-for-a-personal-computer/"
_M2 = _APPLE + "2022/06/apple-unveils-m2-with-breakthrough-performance-and-capabilities/"
_M2_PRO = _APPLE + "2023/01/apple-unveils-m2-pro-and-m2-max-next-generation-chips-for-next-level-workflows/"
_M3 = _APPLE + "2023/10/apple-unveils-m3-m3-pro-and-m3-max-the-most-advanced-chips-for-a-personal-computer/"
_M3_ULTRA = _APPLE + "2025/03/apple-reveals-m3-ultra-taking-apple-silicon-to-a-new-extreme/"
_M4_PRO = _APPLE + "2024/10/apple-introduces-m4-pro-and-m4-max/"
_ARK = "https://www.intel.com/content/www/us/en/products/sku/"
_EPYC = "https://www.amd.com/en/products/processors/server/epyc/"
_GENOA = _EPYC + "4th-generation-9004-and-8004-series/amd-epyc-9654.html"


def _gpu(name: str, memory: float, bandwidth: float, source: str, **teraops: float) -> Machine:
    rates = {kind: rate * T for kind, rate in teraops.items()}
    return Machine(name, round(memory * GB), bandwidth * GB, rates, source)


def _apple(name: str, bandwidth: float, source: str, **teraops: float) -> Machine:
    return Machine(name, None, bandwidth * GB, {kind: rate * T for kind, rate in teraops.items()}, source)


def _cpu(
    name: str, channels: int, rate: int, cores: int, ghz: float, source: str, **per_cycle: int
) -> Machine:
    rates = {kind: cores * ghz * 1e9 * operations for kind, operations in per_cycle.items()}
    return Machine(name, None, channels * rate * 1e6 * 8, rates, source)


_MACHINES = (
    _gpu("A100-40GB", 40, 1555, _A100, float32=19.5, float16=312, int8=624),
    _gpu("A100-80GB", 80, 2039, _A100, float32=19.5, float16=312, int8=624),
    _gpu("H100-SXM", 80, 3350, _H100, float32=67, float16=989.4, float8=1978.9, int8=1978.9),
    _gpu("H100-PCIe", 80, 2000, _H100, float32=51, float16=756, float8=1513, int8=1513),
    _gpu("H200", 141, 4800, _H200, float32=67, float16=989.4, float8=1978.9, int8=1978.9),
    _gpu("B200", 180, 8000, _B200, float32=75, float16=2250, float8=4500, int8=4500),
    _gpu("L4", 24, 300, _L4, float32=30.3, float16=121, float8=242.5, int8=242.5),
    _gpu("L40S", 48, 864, _L40S, float32=91.6, float16=362.05, float8=733, int8=733),
    _gpu("RTX-3090", 24, 936.2, _GA102, float32=35.6, float16=71, int8=284),
    _gpu("RTX-4090", 24, 1008, _ADA, float32=82.6, float16=165.2, float8=330.3, int8=660.6),
    _gpu("RTX-5090", 32, 1792, _GB202, float32=104.8, float16=209.5, float8=419, int8=838),
    _gpu("MI300X", 192, 5300, _MI300X, float32=163.4, float16=1307.4, float8=2614.9, int8=2614.9),
    _apple("M1", 68.25, _APPLE + "2020/11/apple-unleashes-m1/", float32=2.6),
    _apple("M1-Pro", 200, _M1_PRO),
    _apple("M1-Max", 400, _M1_PRO),
    _apple("M1-Ultra", 800, _M1_ULTRA),
    _apple("M2", 100, _M2),
    _apple("M2-Pro", 200, _M2_PRO),
    _apple("M2-Max", 400, _M2_PRO),
    _apple("M2-Ultra", 800, _APPLE + "2023/06/apple-introduces-m2-ultra/"),
    _apple("M3", 100, _M3),
    _apple("M3-Pro", 150, _M3),
    _apple("M3-Max", 400, _M3),
    _apple("M3-Ultra", 819, _M3_ULTRA),
    _apple("M4", 120, _APPLE + "2024/05/apple-introduces-m4-chip/"),
    _apple("M4-Pro", 273, _M4_PRO),
    _apple("M4-Max", 546, _M4_PRO),
    _cpu("Xeon-8280 (Cascade Lake)", 6, 2933, 28, 2.7, _ARK + "192478", float32=64, int8=256),
    _cpu("Xeon-8380 (Ice Lake)", 8, 3200, 40, 2.3, _ARK + "212287", float32=64, int8=256),
    _cpu(
        "Xeon-8480+ (Sapphire Rapids)", 8, 4800, 56, 2.0, _ARK + "231746", float32=64, float16=1024, int8=2048
    ),
    _cpu(
        "Xeon-8592+ (Emerald Rapids)", 8, 5600, 64, 1.9, _ARK + "237261", float32=64, float16=1024, int8=2048
    ),
    _cpu(
        "Xeon-6980P (Granite Rapids)",
        12,
        6400,
        128,
        2.0,
        _ARK + "240777",
        float32=64,
        float16=1024,
        int8=2048,
    ),
    _cpu("EPYC-7742 (Rome)", 8, 3200, 64, 2.25, _EPYC + "7002-series/amd-epyc-7742.html", float32=32),
    _cpu("EPYC-7763 (Milan)", 8, 3200, 64, 2.45, _EPYC + "7003-series/amd-epyc-7763.html", float32=32),
    _cpu("EPYC-9654 (Genoa)", 12, 4800, 96, 2.4, _GENOA, float32=32, float16=64, int8=128),
    _cpu(
        "EPYC-9755 (Turin)",
        12,
        6000,
        128,
        2.7,
        _EPYC + "9005-series/amd-epyc-9755.html",
        float32=64,
        float16=128,
        int8=256,
    ),
)

MACHINES: Mapping[str, Machine] = {machine.name: machine for machine in _MACHINES}
"""Every named machine."""
