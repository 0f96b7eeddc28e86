"""Which instructions the interpreter knows, with which modifiers and types.

PTX puts much of an instruction's meaning into the parts of its opcode: ``add.sat.f32`` is not ``add.f32``. A part that
is not listed here is an error, so that nothing is computed by ignoring it. Parts that only guide caches change no
result and are listed with the memory instructions. A bar sets apart forms that have no parts in common: those of one
opcode must stand on one side.
"""

from .faults import SourceLine, UnknownInstruction

WORDS = "u16 s16 u32 s32 u64 s64"
BITS = "b16 b32 b64"
CACHES = (
    "ca cg cs cv lu wb wt L1::no_allocate L1::evict_first L1::evict_last L1::evict_normal L1::evict_unchanged "
    "L2::cache_hint L2::64B L2::128B L2::256B L2::evict_first L2::evict_last L2::evict_normal"
)
ORDER = "weak volatile relaxed acquire release acq_rel sc cta gpu sys"  # every instruction is seen by all at once
MEMORY = f"global shared local v2 v4 {ORDER} {CACHES} u8 s8 b8 f16 f32 f64 {WORDS} {BITS}"
HALVES = "f16 bf16 f16x2 bf16x2"
MMA = "sync aligned row col f32"

KNOWN = {
    "add": f"rn ftz f32 {WORDS} | rn {HALVES}",
    "sub": f"rn ftz f32 {WORDS} | rn {HALVES}",
    "min": f"ftz f32 {WORDS} | {HALVES}",
    "max": f"ftz f32 {WORDS} | {HALVES}",
    "neg": f"ftz f32 s16 s32 s64 | {HALVES}",
    "abs": f"ftz f32 s16 s32 s64 | {HALVES}",
    "mul": f"rn ftz f32 lo hi wide {WORDS} | rn {HALVES}",
    "mad": f"lo hi wide {WORDS}",
    "fma": f"rn rm ftz f32 | rn {HALVES}",
    "div": f"{WORDS} | rn approx full ftz f32",
    "rem": WORDS,
    "rcp": "rn approx ftz f32",
    "sqrt": "rn approx ftz f32",
    "rsqrt": "approx ftz f32",
    "ex2": "approx ftz f32",
    "lg2": "approx ftz f32",
    "tanh": "approx f32",
    "copysign": "f32",
    "and": f"pred {BITS}",
    "or": f"pred {BITS}",
    "xor": f"pred {BITS}",
    "not": f"pred {BITS}",
    "shl": BITS,
    "shr": f"{WORDS} {BITS}",
    "bfi": "b32 b64",
    "bfe": "u32 s32 u64 s64",
    "shf": "l r wrap clamp b32",
    "lop3": "b32",
    "popc": "b32 b64",
    "clz": "b32 b64",
    "bfind": "shiftamt u32 s32 u64 s64",
    "brev": "b32 b64",
    "prmt": "b32",
    "selp": f"f32 f64 {WORDS} {BITS}",
    "slct": f"{WORDS} {BITS} f32",
    "setp": f"eq ne lt le gt ge ltu leu gtu geu neu ftz f32 f64 {WORDS} {BITS}",
    "cvt": (
        f"rn rni rzi rmi rpi ftz f16 bf16 f32 u8 s8 {WORDS} | sat ftz f32 | "
        "rn satfinite e4m3x2 e5m2x2 f32 | rn f16x2 bf16x2 f32 | rn f16x2 e4m3x2 e5m2x2"
    ),
    "cvta": "to global shared local u64",
    "createpolicy": "fractional L2::evict_first L2::evict_last L2::evict_normal L2::evict_unchanged b64",
    "mov": f"pred f32 f64 {WORDS} {BITS}",
    "ld": f"param nc {MEMORY}",
    "st": MEMORY,
    "atom": f"global shared {ORDER} add min max exch and or xor inc dec cas f32 u32 s32 u64 s64 b32 b64",
    "red": f"global shared {ORDER} add min max and or xor inc dec f32 u32 s32 u64 s64 b32 b64",
    "cp": "async ca cg shared global commit_group wait_group wait_all L2::64B L2::128B L2::256B",
    "membar": "cta gl sys",
    "fence": ORDER,
    "bra": "uni",
    "ret": "uni",
    "exit": "",
    "nanosleep": "u32",
    "bar": "warp cta sync arrive red popc and or u32 pred",
    "barrier": "cta sync arrive red popc and or aligned u32 pred",
    "shfl": "sync idx bfly up down b32",
    "vote": "sync all any ballot pred b32",
    "match": "any all sync b32 b64",
    "redux": "sync add min max u32 s32 | sync and or xor b32",
    "activemask": "b32",
    "ldmatrix": "sync aligned m8n8 x1 x2 x4 trans shared b16",
    "movmatrix": "sync aligned m8n8 trans b16",
    "mma": f"{MMA} m16n8k8 m16n8k16 f16 | {MMA} m16n8k8 m16n8k16 bf16 | {MMA} m16n8k32 e4m3 e5m2",
}
FORMS = {name: [frozenset(parts.split()) for parts in forms.split("|")] for name, forms in KNOWN.items()}


def check_known(opcode: tuple[str, ...], text: str, line: SourceLine) -> None:
    """UnknownInstruction, with instruction and source line, unless every part of the opcode is known."""
    name, *parts = opcode
    if name not in FORMS:
        raise UnknownInstruction(f"{name}: unknown instruction {text} at {line}")
    unknown = min(([part for part in parts if part not in form] for form in FORMS[name]), key=len)
    if unknown:
        raise UnknownInstruction(f"{name}: unknown modifier .{unknown[0]} in {text} at {line}")
