"""The tables that the forward pass reads: which number stands in which field.

Three int64 arrays carry a model and a step. `job` holds the step's sizes and the addresses of its buffers; `layers`
has a row for each layer; `matrices` has a row for each weight matrix: seven for each layer, in the order of Q ...
DOWN, then the output matrix; where there are experts, then four for each layer, ROUTER ... DOWN_EXPS, whose N_PANELS
counts those of one expert; the panels of all experts follow each other; where attention is latent, then Q_A, K_B and
V_B for each layer. An address of 0 means that the thing does not
exist. Because everything is a number in a table, one compilation of `kernels.forward` serves every model.
"""

from enum import IntEnum


class Job(IntEnum):
    """Fields of `job`."""

    N_TOKENS = 0
    N_LOGITS = 1
    HIDDEN = 2
    N_HEADS = 3
    N_KV_HEADS = 4
    HEAD_DIM = 5
    MOE = 6  # address of the table of `Moe`; 0: no layer has experts
    MAX_TILE = 7
    ACTIVATION = 8
    ROPE_WIDTH = 9
    NEIGHBOURS = 10
    CONSTANTS = (
        11  # address of float32: norm eps, scale and soft cap of attention, soft cap and scale of the logits,
    )
    # scale of a branch
    POSITIONS = 12  # address of int32 [n_tokens]
    SEQUENCES = 13  # address of int32 [n_tokens]
    PAGE_TABLES = 14  # address of int32 [n_seqs, max_pages]
    MAX_PAGES = 15
    LOGIT_ROWS = 16  # address of int32 [n_logits]
    CACHE = 17  # address of the KV cache [layers, KV heads, keys then values, pages, page_bytes]
    N_PAGES = 18  # of the cache
    PAGE_BYTES = 19  # of the keys, or the values, of one head in one page
    X = 20  # float32 [n_tokens, hidden], the residual stream
    Y = 21  # float32 [n_tokens, hidden], a branch before its bias, norm or scale
    QUERIES = 22  # float32 [n_tokens, n_heads * head_dim]
    KEYS = 23  # float32 [n_tokens, n_kv_heads * head_dim]
    VALUES = 24  # likewise
    ATTENDED = 25  # float32 [n_tokens, n_heads * head_dim]
    GATE = 26  # float32 [n_tokens, ffn]
    UP = 27  # likewise
    BYTE_TILES = 28  # activations of the next product
    FLOAT_TILES = 29  # the same, for float weights
    LOGITS = 30  # float32 [n_logits, logit_stride / 4]
    LOGIT_STRIDE = 31  # bytes
    VOCAB = 32
    SCRATCH = 33  # of attention, scratch_stride bytes a thread: scores, merge state, one partial result
    SCRATCH_STRIDE = 34
    ATTENTION = 35  # address of the attention worker for a full pass of heads
    ATTENTION_REST = 36  # and for the heads that remain in a group
    PASS_HEADS = 37  # query heads of a full pass
    OUTPUT_NORM = 38  # address of float32 [hidden]
    OUTPUT_INPUT = 39  # which tiles the output matrix reads: bit 0 bytes, bit 1 floats
    CACHE_IS_INT8 = 40
    QUERY_TILES = 41  # the rotated queries, see `kernels.pages`
    MAX_PARTITIONS = 42  # of the longest context, where attention is split over its partitions; else 0
    PARTIALS = 43  # partial results of a split [n_tokens, n_kv_heads, max_partitions, group]
    CACHE_SCALES = 44  # int8 only: address of float32 [layers, KV heads, keys then values, pages, 16]
    CLOCK = 45  # address of the log of `kernels.clock`, while somebody wants to know where the time goes
    QUERY_STEP = 46  # bytes between two elements of a row of a query tile
    QUERY_TILE_BYTES = 47
    TILE_TOKENS = 48  # tokens of a query tile
    ATTENTION_TILE = 49  # address of the attention worker for a full pass of heads of a whole tile
    ATTENTION_TILE_REST = 50
    SCORES_BYTES = 51  # of scratch
    STATE_BYTES = 52
    LAYER_NORM = 53  # whether norms subtract the mean
    IS_GATED = 54  # whether the activation of GATE is multiplied by UP
    HEAD_NORM_STRIDE = 55  # bytes between the norm weights of two heads of q or k; 0: the same for all
    OUTPUT_NORM_BIAS = 56
    OUTPUT_BIAS = 57  # address of float32 [logit_stride / 4]
    EXPERT_WORKER = 58  # address of `kernels.moe.expert_worker`
    ANGLE_ROWS = 59  # address of int32 [n_tokens]: rows of COS and SIN
    LORA_WORKER = 60  # address of `kernels.lora.lora_worker`; 0: no token of the step has an adapter
    LORA = 61  # address of the table of `Lora`
    LATENT = 62  # address of the table of `Latent`; 0: keys and values of each head are cached
    LATENT_WORKER = 63  # address of `kernels.latent.latent_worker`
    OUT_SOURCE = (
        64  # address of the rows that the product at the end of attention reads: ATTENDED, or `Latent.OUT`
    )
    OUT_WIDTH = 65  # their floats
    DOWN_TILES = 66  # of bytes, for DOWN, where the tiles of GATE and UP are still being read


class Layer(IntEnum):
    """Fields of a row of `layers`; norms and biases are addresses of float32, 0 where there is none."""

    ATTN_NORM = 0
    Q_BIAS = 1
    K_BIAS = 2
    V_BIAS = 3
    Q_NORM = 4
    K_NORM = 5
    POST_ATTN_NORM = 6
    FFN_NORM = 7
    POST_FFN_NORM = 8
    COS = 9  # address of float32 [rows, rope_width / 2]; 0: this layer does not rotate
    SIN = 10
    WINDOW = 11  # tokens seen, the current one included; 0: all
    QKV_INPUT = 12  # which tiles the products read: bit 0 bytes, bit 1 floats
    OUT_INPUT = 13
    FFN_INPUT = 14
    DOWN_INPUT = 15
    SINKS = 16  # address of float32 [n_heads]: a score that weighs in without a value
    ATTN_NORM_BIAS = 17
    FFN_NORM_BIAS = 18
    OUT_BIAS = 19  # of the products that end the branches
    DOWN_BIAS = 20
    GATE_BIAS = 21
    UP_BIAS = 22
    ATTN_END = 23  # where the product that ends a branch goes: TO_X, TO_Y or ONTO_Y
    FFN_END = 24
    Q_ROW_NORM = 25  # norm of all heads of q as one vector
    K_ROW_NORM = 26
    FFN = 27  # width of this layer's feed-forward network, or of its shared expert
    HAS_EXPERTS = 28
    EXPERT_INPUT = 29  # which tiles the experts' products read: bit 0 bytes, bit 1 floats
    EXPERT_DOWN_INPUT = 30
    ROUTER_BIAS = 31  # address of float32 [n_experts]
    CHOICE_BIAS = 32  # added to the scores for the choice alone
    EXPERT_GATE_BIAS = 33  # address of float32 [n_experts, width of an expert]
    EXPERT_UP_BIAS = 34
    EXPERT_DOWN_BIAS = 35  # address of float32 [n_experts, hidden]
    LATENT_MATRICES = 36  # address of the rows of Q_A, K_B and V_B in `matrices`
    LATENT_Q_INPUT = 37  # which tiles Q reads where it follows Q_A; and what K_B and V_B read
    LATENT_KEY_INPUT = 38
    LATENT_VALUE_INPUT = 39
    Q_A_NORM = 40
    KV_A_NORM = 41
    K_REST = 42  # what an int8 cache keeps of K_BIAS; 0: nothing
    K_TERMS = 43  # what it leaves out: address of terms of each KV head, see `kernels.pages`; 0: nothing
    TURNS = 44  # COS and SIN for those terms: address of float32 [rope_width / 2, cosine then sine, rows]
    TURN_BYTES = 45  # of a row of cosines or sines there


TO_X, TO_Y, ONTO_Y = range(3)


class Moe(IntEnum):
    """Fields of the table of a model's experts. A row is one of a pair of token and expert, see `kernels.moe`."""

    N_EXPERTS = 0
    N_USED = 1
    FFN = 2  # width of an expert
    SCORING = 3
    NORMALISE = 4
    HAS_SHARED_GATE = 5
    WEIGHT_SCALE = 6  # address of one float32
    SCORES = 7  # float32: router outputs, then what is chosen by
    SCORES_STRIDE = 8  # bytes between tokens there
    CHOSEN = 9  # int32 [n_tokens, n_used], experts
    WEIGHTS = 10  # float32 [n_tokens, n_used]
    ROWS = 11  # int32 [n_tokens, n_used], place in the expert's group
    SHARED_GATES = 12  # float32 [n_tokens]
    COUNTS = 13  # int32 [n_experts], pairs
    FIRSTS = 14  # int32 [n_experts], row of the group
    ACTIVE = 15  # int32 [n_experts], those in use, ascending
    N_ACTIVE = 16
    ACTIVE_OF_LAYERS = 17  # int32 [n_layers], how many experts the step used
    GATE = 18  # float32 [rows, width of an expert]
    UP = 19
    OUT = 20  # float32 [rows, hidden]
    BYTE_TILES = 21
    FLOAT_TILES = 22
    N_GROUPS = 23
    N_GROUPS_USED = 24


class Latent(IntEnum):
    """Fields of the table of latent attention, see `kernels.latent`."""

    Q_RANK = 0  # width of the vectors that queries are made from; 0: the hidden state itself
    NOPE = 1  # dimensions of a query that are not rotated
    VALUE = 2  # width of a head's output
    QUERIES = 3  # float32 [n_tokens, n_heads, nope + rope]
    KEY_VALUES = 4  # float32 [n_tokens, head_dim], c and then the rotated part
    COMPRESSED = 5  # float32 [n_tokens, q_rank]
    OUT = 6  # float32 [n_tokens, n_heads, value]
    BYTE_TILES = 7  # of each head, ROWS tokens
    FLOAT_TILES = 8
    ROWS = 9


class Lora(IntEnum):
    """Fields of the table of a model's low-rank adapters."""

    TOKEN_ADAPTERS = 0  # int32 [n_tokens], numbers of adapters, -1 for none
    MATRICES = 1  # int64 [n_adapters, n_matrices, fields of `LoraMatrix`]
    N_MATRICES = 2
    SHRUNK = 3  # float32 [n_tokens * matrices of a phase, max_rank]
    MAX_RANK = 4


class LoraMatrix(IntEnum):
    """What an adapter adds to one matrix; of rank 0 if nothing."""

    A = 0  # address of float32 [rank, inputs]
    B = 1  # address of float32 [rank, outputs]
    RANK = 2
    OUTPUTS = 3


LORA_MATRIX_FIELDS = len(LoraMatrix)


class Matrix(IntEnum):
    """Fields of a row of `matrices`."""

    PANELS = 0  # address
    N_PANELS = 1
    PANEL_BYTES = 2
    N_GROUPS = 3
    IS_FLOAT = 4
    FINE = 5  # whether it reads 16-bit activations
    WORKERS = 6  # addresses of the workers for tiles of 1, 2, 4, ..., 64 tokens


MATRIX_FIELDS = int(Matrix.WORKERS) + 7
MATRICES_PER_LAYER = 7
Q, K, V, OUT, GATE, UP, DOWN = range(MATRICES_PER_LAYER)
EXPERT_MATRICES_PER_LAYER = 4
ROUTER, GATE_EXPS, UP_EXPS, DOWN_EXPS = range(EXPERT_MATRICES_PER_LAYER)
LATENT_MATRICES_PER_LAYER = 3
Q_A, K_B, V_B = range(LATENT_MATRICES_PER_LAYER)
