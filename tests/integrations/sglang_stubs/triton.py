from stub_modules import replace

_stub = replace(__name__)
_stub.cdiv = lambda a, b: -(a // -b)
_stub.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
_stub.backends.backends = {}  # torch looks whether "cpu" is in it
