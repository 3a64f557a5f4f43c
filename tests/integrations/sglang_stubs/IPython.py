from stub_modules import replace

replace(__name__)
