"""The llama.cpp side of `quantize.py`: its own quantizer. Knows nothing of Ropewalk.

    /path/to/python worker_quantize.py SOURCE.gguf TARGET.gguf FILE_TYPE THREADS [IMPORTANCE.npz]

runs in an environment that has llama-cpp-python; FILE_TYPE is a number of `general.file_type`, IMPORTANCE holds float32
arrays by the names of tensors. Prints the seconds.
"""

import ctypes
import os
import sys
import time

import llama_cpp
import numpy as np

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
source, target, file_type, threads, *importance = sys.argv[1:]
options = llama_cpp.llama_model_quantize_default_params()
options.ftype, options.nthread, options.allow_requantize = int(file_type), int(threads), True
arrays = {n: np.ascontiguousarray(v, np.float32) for f in importance for n, v in np.load(f).items()}
entries = (llama_cpp.llama_model_imatrix_data * (len(arrays) + 1))()  # the last has no name
for entry, (name, values) in zip(entries, arrays.items(), strict=False):
    entry.name, entry.size = name.encode(), values.size
    entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
if arrays:
    options.imatrix = entries
start = time.perf_counter()
if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)):
    sys.exit(f"llama.cpp could not quantize {source}")
answers.write(f"{time.perf_counter() - start}\n")
answers.close()
