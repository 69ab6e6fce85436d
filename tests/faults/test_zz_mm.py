import pytest, torch, time
import tfstyle_dist as td
from tfstyle_dist.core.errors import *
@pytest.mark.distributed(workers=2, timeout=40, deadline=6, may_die=(0,1))
@pytest.mark.parametrize("kind", ["backward_vs_all_reduce", "all_reduce_vs_gather", "extra", "shape", "dtype", "op", "reduce_vs_merge"])
def test_mm(rank, kind):
    s = td.MirroredStrategy()
    with s.scope():
        m = torch.nn.Linear(300, 10)
    def f():
        c = td.get_replica_context()
        if kind == "backward_vs_all_reduce":
            if rank: m(torch.ones(1,300)).sum().backward()
            else: c.all_reduce("SUM", torch.ones(3))
        elif kind == "all_reduce_vs_gather":
            if rank: c.all_gather(torch.ones(3), 0)
            else: c.all_reduce("SUM", torch.ones(3))
        elif kind == "extra":
            if rank: c.all_reduce("SUM", torch.ones(3))
        elif kind == "shape":
            c.all_reduce("SUM", torch.ones(3 + rank))
        elif kind == "dtype":
            c.all_reduce("SUM", torch.ones(3, dtype=[torch.float32, torch.float64][rank]))
        elif kind == "op":
            c.all_reduce(["SUM", "MEAN"][rank], torch.ones(3))
        elif kind == "reduce_vs_merge":
            if rank: c.all_reduce("SUM", torch.ones(3))
            else: c.merge_call(lambda s: None)
        m(torch.ones(1,300)).sum().backward()
    t=time.time()
    try:
        s.run(f)
        out = "no error"
    except BaseException as e:
        out = f"{type(e).__name__}: {e}\n{getattr(e,'__notes__',None)}"
    open(f"/tmp/x/out-{kind}-{rank}", "w").write(f"{time.time()-t:.1f} s {out}\n")
    s.close()
