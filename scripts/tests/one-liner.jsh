var q = randn(1, 1024, 8, 128)
var k = randn(1, 1024, 2, 128)
var v = randn(1, 1024, 2, 128)
var out = flash(q, k, v)
out
maxDiff(out, sliding(1024, q, k, v))
var g = randn(1, 100, 2, 128)
var beta = randn(1, 100, 2)
KimiDeltaAttention.bounded(-5).withQkL2Norm(true).withBeta(Beta.SIGMOID).run(g, g, g, g, beta)
flash(q, k, randn(1, 1024, 3, 128))
/exit
