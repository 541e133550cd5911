"""Mixes fresh entropy into every random number generator that this process has warmed.

A sandbox is restored from an image of its memory, so without this every copy would draw the same
numbers. ``os.urandom``, ``secrets`` and ``uuid.uuid4`` ask the kernel and need no help. Modules
that are not loaded have no state yet and will seed themselves.

Generators that user code made with a seed of its own choice keep it: their sequence is meant to
be reproducible.
"""

import gc
import hashlib
import os
import sys

# A seed that NumPy drew for itself has 128 bits; one that a person chose is rarely this large.
DRAWN_SEED_MIN = 1 << 64


def reseed(entropy):
    seed = hashlib.sha512(entropy + os.urandom(32)).digest()
    for step in (python, openssl, uuid, tempfile, numpy, torch):
        try:
            step(hashlib.sha512(step.__name__.encode() + seed).digest())
        except Exception as error:
            print(f"reseeding {step.__name__}: {error!r}", file=sys.__stderr__)


def python(seed):
    if random := sys.modules.get("random"):
        random.seed(seed)


def openssl(seed):
    # The primary generator takes new entropy from the kernel as well, and those of the threads
    # notice that it changed.
    if ssl := sys.modules.get("ssl"):
        ssl.RAND_add(seed, float(len(seed)))
    if rust := sys.modules.get("cryptography.hazmat.bindings._rust"):
        library = getattr(getattr(rust, "_openssl", None), "lib", None)
        if hasattr(library, "RAND_add"):
            library.RAND_add(seed, len(seed), float(len(seed)))


def uuid(seed):
    if module := sys.modules.get("uuid"):
        # Version 1 from Python's own code: libuuid keeps a clock sequence that copies share.
        module._generate_time_safe = None
        module._UuidCreate = None
        module._last_timestamp = None
        module._node = int.from_bytes(seed[:6], "big") | (1 << 40)


def tempfile(seed):
    if module := sys.modules.get("tempfile"):
        module._name_sequence = None


def numpy(seed):
    module = sys.modules.get("numpy.random")
    if module is None:
        return
    words = [int.from_bytes(seed[i : i + 4], "little") for i in range(0, len(seed), 4)]
    module.seed(words)
    reseed_generators(module, words)


def reseed_generators(module, words):
    """Those that user code made with ``default_rng()`` and no seed.

    The launcher froze what it had loaded, so this looks at what user code has made only.
    """
    generator = module.Generator
    for number, held in enumerate(
        [thing for thing in gc.get_objects() if type(thing) is generator]
    ):
        bits = held.bit_generator
        sequence = getattr(bits, "seed_seq", None) or getattr(bits, "_seed_seq", None)
        drawn = getattr(sequence, "entropy", None)
        if isinstance(drawn, int) and drawn >= DRAWN_SEED_MIN:
            bits.state = type(bits)(module.SeedSequence([*words, number])).state


def torch(seed):
    if module := sys.modules.get("torch"):
        module.manual_seed(int.from_bytes(seed[:8], "little") >> 1)
