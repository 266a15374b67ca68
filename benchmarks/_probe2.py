import os,sys,time,json
sys.path.insert(0,"src")
import numpy as np, torch, triton
import scram, scram.gpu
from scram import Search, reference
from scram.types import Matches
gs=sys.modules["scram.gpu.search"]; ga=sys.modules["scram.gpu.attend"]; gt=sys.modules["scram.gpu.tiles"]; gb=sys.modules["scram.gpu.attend_backward"]
dev="cuda"
def feats(img,E,basis=None,size=512):
    x=torch.from_numpy(img).to(dev).float().permute(2,0,1)[None]/255
    if size!=512: x=torch.nn.functional.interpolate(x,size=(size,size),mode="bilinear",align_corners=False)
    x=torch.nn.functional.pad(x,(3,3,3,3),mode="reflect")
    p=torch.nn.functional.unfold(x,7)[0].T
    if basis is None:
        s=p[::29]; m=s.mean(0); basis=(m,torch.linalg.eigh((s-m).T@(s-m))[1][:,-E:])
    y=(p-basis[0])@basis[1]
    return torch.nn.functional.normalize(y,dim=-1).reshape(1,1,size,size,E),basis
im=np.load("build/gpu_data/images.npz")
def stereo(E,size=512,dtype=torch.bfloat16):
    q,b=feats(im["left"],E,size=size); k,_=feats(im["right"],E,b,size=size); return q.to(dtype).contiguous(),k.to(dtype).contiguous()
def bench(fn,rep=30):
    fn(); torch.cuda.synchronize()
    ts=[]
    for _ in range(rep):
        a,b=torch.cuda.Event(True),torch.cuda.Event(True); a.record(); fn(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return float(np.median(ts))
def fast(q,k,s,seed=3,warm=None,causal=False,mask=None):
    return scram.gpu.search(q,k,torch.tensor(seed),mask,warm,matches=s.matches,separation=s.separation,sweeps=s.sweeps,jumps=s.jumps,propagate=s.propagate,gossip=s.gossip,causal=causal)
def correctness():
    for qg,kg,E,B,H,Hk,causal,mask,dtype,kw in [((33,40),(40,37),64,1,1,1,False,0,torch.bfloat16,dict(propagate="shift",gossip=0)),((33,40),(33,40),3,2,4,2,True,0,torch.float32,dict(matches=3)),
        ((200,),(300,),5,1,2,2,False,1,torch.float16,dict(propagate="turns",matches=2,separation=2)),((9,8,7),(7,8,9),60,1,1,1,False,1,torch.bfloat16,dict()),((3,4,5,6),(6,5,4,3),128,1,1,1,False,0,torch.float32,dict(matches=2))]:
        g=torch.Generator().manual_seed(0)
        q=torch.randint(-3,4,(B,H,*qg,E),generator=g).to(dtype).to(dev); k=torch.randint(-3,4,(B,Hk,*kg,E),generator=g).to(dtype).to(dev)
        m=(torch.rand(B,*kg,generator=g)<0.5).to(dev) if mask else None
        s=Search(seed=3,**kw)
        r=reference.search(q,k,s,seed=torch.tensor(3),causal=causal,key_mask=m,score="dot",warm=None)
        t=time.time(); i,sc=fast(q,k,s,causal=causal,mask=m); torch.cuda.synchronize()
        print("fields", "OK" if torch.equal(i,r.index) and torch.equal(sc,r.score) else "BAD %.4f"%(i==r.index).float().mean(), qg,E,f"first {time.time()-t:.1f}s",flush=True)
        v=torch.randn(B,Hk,*kg,E).to(dtype).to(dev)
        kw2=dict(radius=(1,)*len(qg),causal=causal,scale=0.05,weight="softmax",dropout_p=0.0)
        o,l=scram.gpu.attend(q,k,v,i,m,None,None,None,**kw2)
        rr=reference.attend(q.double(),k.double(),v.double(),i,**{k_:v_ for k_,v_ in kw2.items()},key_mask=m,score="dot",extra=None,dropout_seed=None)
        print("   attend err",(o.double()-rr.out).norm().item()/rr.out.norm().item(),torch.where(l==rr.lse,0,l.double()-rr.lse).abs().max().item(),flush=True)
def tile(l,t,w): return lambda r,wd,d: gt._block(r,wd,d,l,t,w)

def gtime(fn,rep=20):
    fn(); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): fn()
    g.replay(); torch.cuda.synchronize()
    return bench(g.replay,rep)
def at_(v):
    def at(rank,w,f,d,vd):
        b=gt._block(rank,w,d,*v); c=gt._block(rank,f,vd,*v); return {**b,"FW":c["W"],"FPIECES":c["PIECES"]}
    return at
if __name__=="__main__":
    t0=time.time()
    P=Search.paper()
    if "ncu" in sys.argv:
        q,k=stereo(64); gs.search_tile=tile(16,2,1); fast(q,k,P); torch.cuda.synchronize(); sys.exit()
    correctness() if "check" in sys.argv else None
    for E,dt,size,variants in ((64,torch.bfloat16,512,((16,2,1),(32,2,1),(32,4,2),(16,4,1),(32,4,4),(64,2,4),(64,4,4),(64,4,2))),(64,torch.bfloat16,1024,((16,2,1),(32,2,1),(32,4,2),(64,4,4))),(3,torch.float32,512,((32,1,1),(64,1,1),(64,1,2),(128,1,4)))):
        q,k=stereo(E,size,dt)
        for v in variants:
            gs.search_tile=tile(*v); r=[]
            for vote in (False,True):
                gs.VOTE=vote; r.append(gtime(lambda: fast(q,k,P)))
            print("search",E,size,v,[f"{x:.3f}" for x in r],flush=True)
        gs.VOTE=False; gs.search_tile=tile(*variants[0])
        if size==512:
            prev=0
            for T in range(0,9):
                s=Search(method="query",sweeps=T,propagate="shift",gossip=0,seed=0); x=gtime(lambda: fast(q,k,s)); print("  T",T,f"{x:.3f} +{x-prev:.3f}",flush=True); prev=x
            qr,kr=torch.randn_like(q),torch.randn_like(k); print("  random data",f"{gtime(lambda: fast(qr,kr,P)):.3f}")
            i,sc=fast(q,k,P)
            for v in ((16,2,1),(32,2,2),(32,4,4),(64,4,4),(32,8,4),(64,4,8)) if E>8 else ((32,1,1),(64,1,2),(128,1,4),(32,4,4)):
                ga.attend_tile=at_(v)
                r=[gtime(lambda: scram.gpu.attend(q,k,k,i,None,None,None,None,radius=(b,b),causal=False,scale=8.0,weight="softmax",dropout_p=0.0)) for b in (0,1,2)]
                gb.backward_tile=at_(v)
                o,l=scram.gpu.attend(q,k,k,i,None,None,None,None,radius=(1,1),causal=False,scale=8.0,weight="softmax",dropout_p=0.0)
                go,gl=torch.randn_like(o),torch.randn_like(l)
                x=gtime(lambda: scram.gpu.attend_backward(go,gl,q,k,k,i,None,None,None,None,o,l,radius=(1,1),causal=False,scale=8.0,weight="softmax",dropout_p=0.0))
                print("  attend b=0,1,2",v,[f"{x:.3f}" for x in r],f"backward b=1 {x:.3f}",flush=True)
            torch.use_deterministic_algorithms(True)
            bk=lambda: scram.gpu.attend_backward(go,gl,q,k,k,i,None,None,None,None,o,l,radius=(1,1),causal=False,scale=8.0,weight="softmax",dropout_p=0.0)
            a,b=bk(),bk(); print("  deterministic backward",f"{bench(bk,5):.3f}",all(torch.equal(x,y) for x,y in zip(a[:3],b[:3])),flush=True)
            torch.use_deterministic_algorithms(False); c=bk(); print("   atomics vs fixed",[((x.float()-y.float()).norm()/x.float().norm()).item() for x,y in zip(a[:3],c[:3])])
    q,k=stereo(3,512,torch.float32); gs.search_tile=tile(32,1,1); ga.attend_tile=at_((32,1,1))
    print("attention 512 E3",bench(lambda: scram.attention(q,k,k,search=P)))
    import cProfile,pstats,io
    for _ in range(20): scram.attention(q,k,k,search=P)
    torch.cuda.synchronize()
    t=time.time()
    for _ in range(100): scram.attention(q,k,k,search=P)
    h=(time.time()-t)/100; torch.cuda.synchronize(); print("host ms per call",h*1e3,"with device",(time.time()-t)/100*1e3)
    t=time.time()
    for _ in range(100): fast(q,k,P)
    h=(time.time()-t)/100; torch.cuda.synchronize(); print("host ms per search",h*1e3)
    pr=cProfile.Profile(); pr.enable()
    for _ in range(100): scram.attention(q,k,k,search=P)
    pr.disable(); out=io.StringIO(); pstats.Stats(pr,stream=out).sort_stats("tottime").print_stats(25); print("\n".join(l[:130] for l in out.getvalue().splitlines()[6:]))
    print("t",time.time()-t0)
