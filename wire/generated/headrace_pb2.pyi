from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "prompt_logprobs", "stop_token_ids", "min_tokens", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    prompt_logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "tokens", "num_prompt_tokens", "sampling", "salt", "boundaries")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: Sampling
    salt: bytes
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., salt: _Optional[bytes] = ..., boundaries: _Optional[_Iterable[int]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprobs: Logprobs
    def __init__(self, id: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("fingerprint", "version", "dtype", "state_dtype", "block_size", "num_attention_layers", "num_kv_heads", "head_dim", "conv_shape", "rec_shape")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTENTION_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    CONV_SHAPE_FIELD_NUMBER: _ClassVar[int]
    REC_SHAPE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    version: int
    dtype: str
    state_dtype: str
    block_size: int
    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    conv_shape: _containers.RepeatedScalarFieldContainer[int]
    rec_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fingerprint: _Optional[str] = ..., version: _Optional[int] = ..., dtype: _Optional[str] = ..., state_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_attention_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., conv_shape: _Optional[_Iterable[int]] = ..., rec_shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("nonce", "attention_hit_tokens", "num_tokens", "transfer_address", "layout", "max_message_bytes", "deadline_s")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    attention_hit_tokens: int
    num_tokens: int
    transfer_address: str
    layout: Layout
    max_message_bytes: int
    deadline_s: float
    def __init__(self, nonce: _Optional[int] = ..., attention_hit_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., transfer_address: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., max_message_bytes: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class TransferReport(_message.Message):
    __slots__ = ("attention_tokens", "attention_bytes", "state_bytes", "seconds")
    ATTENTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    attention_tokens: int
    attention_bytes: int
    state_bytes: int
    seconds: float
    def __init__(self, attention_tokens: _Optional[int] = ..., attention_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "reservation", "first_token")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    request: Request
    reservation: Reservation
    first_token: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., reservation: _Optional[_Union[Reservation, _Mapping]] = ..., first_token: _Optional[int] = ...) -> None: ...

class PrefillReport(_message.Message):
    __slots__ = ("node", "attention_hit_tokens", "state_hit_tokens", "resumed_tokens", "computed_tokens", "checkpoints")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    node: str
    attention_hit_tokens: int
    state_hit_tokens: int
    resumed_tokens: int
    computed_tokens: int
    checkpoints: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node: _Optional[str] = ..., attention_hit_tokens: _Optional[int] = ..., state_hit_tokens: _Optional[int] = ..., resumed_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., checkpoints: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("first_token", "prompt_logprobs", "done")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    prompt_logprobs: PromptLogprobs
    done: PrefillDone
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "finish")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    token: Token
    finish: FinishReason
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., finish: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: PrefillReport
    def __init__(self, report: _Optional[_Union[PrefillReport, _Mapping]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("start", "renew", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: Start
    renew: Renew
    stop: Stop
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("request", "may_prefill_remotely")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MAY_PREFILL_REMOTELY_FIELD_NUMBER: _ClassVar[int]
    request: Request
    may_prefill_remotely: bool
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., may_prefill_remotely: _Optional[bool] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("failed_nonce",)
    FAILED_NONCE_FIELD_NUMBER: _ClassVar[int]
    failed_nonce: int
    def __init__(self, failed_nonce: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("reserved", "local", "handover_failed", "landed", "tokens", "done", "prompt_logprobs")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FAILED_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    reserved: Reservation
    local: LocalPrefill
    handover_failed: HandoverFailed
    landed: TransferReport
    tokens: Tokens
    done: DecodeDone
    prompt_logprobs: PromptLogprobs
    def __init__(self, reserved: _Optional[_Union[Reservation, _Mapping]] = ..., local: _Optional[_Union[LocalPrefill, _Mapping]] = ..., handover_failed: _Optional[_Union[HandoverFailed, _Mapping]] = ..., landed: _Optional[_Union[TransferReport, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., done: _Optional[_Union[DecodeDone, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class LocalPrefill(_message.Message):
    __slots__ = ("resumed_tokens",)
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    resumed_tokens: int
    def __init__(self, resumed_tokens: _Optional[int] = ...) -> None: ...

class HandoverFailed(_message.Message):
    __slots__ = ("nonce", "cause")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    cause: str
    def __init__(self, nonce: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class DecodeReport(_message.Message):
    __slots__ = ("node", "attention_hit_tokens", "state_hit_tokens", "state", "computed_tokens", "checkpoints")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    node: str
    attention_hit_tokens: int
    state_hit_tokens: int
    state: str
    computed_tokens: int
    checkpoints: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node: _Optional[str] = ..., attention_hit_tokens: _Optional[int] = ..., state_hit_tokens: _Optional[int] = ..., state: _Optional[str] = ..., computed_tokens: _Optional[int] = ..., checkpoints: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeDone(_message.Message):
    __slots__ = ("finish", "report")
    FINISH_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    finish: FinishReason
    report: DecodeReport
    def __init__(self, finish: _Optional[_Union[FinishReason, str]] = ..., report: _Optional[_Union[DecodeReport, _Mapping]] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("name", "role", "incarnation", "address", "transfer_address", "layout", "max_model_tokens", "num_blocks", "num_slots", "pid")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    incarnation: int
    address: str
    transfer_address: str
    layout: Layout
    max_model_tokens: int
    num_blocks: int
    num_slots: int
    pid: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., transfer_address: _Optional[str] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., max_model_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("total", "free", "cached", "in_use")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    in_use: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., in_use: _Optional[int] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("running", "waiting", "blocks", "slots", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    blocks: PoolStatus
    slots: PoolStatus
    counters: _containers.ScalarMap[str, float]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks: _Optional[_Union[PoolStatus, _Mapping]] = ..., slots: _Optional[_Union[PoolStatus, _Mapping]] = ..., counters: _Optional[_Mapping[str, float]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("info", "status")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    info: NodeInfo
    status: NodeStatus
    def __init__(self, info: _Optional[_Union[NodeInfo, _Mapping]] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("info", "status")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    info: NodeInfo
    status: NodeStatus
    def __init__(self, info: _Optional[_Union[NodeInfo, _Mapping]] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("heartbeat_s",)
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    def __init__(self, heartbeat_s: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("name", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
