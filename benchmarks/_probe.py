import os,sys,time,json
sys.path.insert(0,"src")
import numpy as np, torch, triton
import scram, scram.gpu
from scram import Search, reference
from scram.types import Matches
gs=sys.modules["scram.gpu.search"]; ga=sys.modules["scram.gpu.attend"]; gt=sys.modules["scram.gpu.tiles"]
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
if __name__=="__main__":
    t0=time.time(); correctness(); print("t",time.time()-t0,flush=True)
    P=Search.paper()
    for E,dt,sizes,variants in ((64,torch.bfloat16,(512,),((16,2,1),(32,2,2),(64,2,4),(32,4,2),(32,4,4),(64,4,4),(32,8,4),(16,4,1),(32,2,1))),(3,torch.float32,(512,),((32,1,1),(64,1,1),(64,1,2),(128,1,4),(256,1,8)))):
        for size in sizes:
            q,k=stereo(E,size,dt)
            for v in variants:
                gs.search_tile=tile(*v)
                ms=bench(lambda: fast(q,k,P))
                print("search",E,size,v,f"{ms:.3f} ms",flush=True)
            gs.search_tile=tile(*variants[0])
            for T in (0,1,2,4):
                s=Search(method="query",sweeps=T,propagate="shift",gossip=0,seed=0); print("  T",T,f"{bench(lambda: fast(q,k,s)):.3f}",flush=True)
            i,sc=fast(q,k,P); m=Matches(i,sc,(size,size))
            print("  recall",scram.measure.recall(q,k,m,sample=2000).item())
            qr,kr=torch.randn_like(q),torch.randn_like(k); print("  random data",f"{bench(lambda: fast(qr,kr,P)):.3f}")
            for kap in (2,4):
                s=Search.paper(matches=kap); print("  kappa",kap,f"{bench(lambda: fast(q,k,s),10):.3f}",flush=True)
            for v in ((16,2,1),(32,2,2),(32,4,4),(64,4,4),(32,8,4),(64,8,8)) if E>8 else ((32,1,1),(128,1,4),(32,4,4)):
                def at(rank,w,f,d,vd,v=v):
                    b=gt._block(rank,w,d,*v); c=gt._block(rank,f,vd,*v); return {**b,"FW":c["W"],"FPIECES":c["PIECES"]}
                ga.attend_tile=at
                r=[bench(lambda: scram.gpu.attend(q,k,k,i,None,None,None,None,radius=(b,b),causal=False,scale=8.0,weight="softmax",dropout_p=0.0)) for b in (0,1,2)]
                print("  attend b=0,1,2",v,[f"{x:.3f}" for x in r],flush=True)
    for size in (1024,):
        q,k=stereo(64,size)
        for v in ((16,2,1),(64,2,4)):
            gs.search_tile=tile(*v); print("search 64",size,v,f"{bench(lambda: fast(q,k,P),10):.3f}",flush=True)
    q,k=stereo(64); gs.search_tile=tile(16,2,1)
    print("attention 512 E64",bench(lambda: scram.attention(q,k,k,search=P)))
    q,k=stereo(3,512,torch.float32); gs.search_tile=tile(32,1,1)
    print("attention 512 E3",bench(lambda: scram.attention(q,k,k,search=P)))
    t=time.time(); 
    for _ in range(50): scram.attention(q,k,k,search=P)
    h=(time.time()-t)/50; torch.cuda.synchronize(); print("host ms per call",h*1e3,"with device",(time.time()-t)/50*1e3)
    print("t",time.time()-t0)
