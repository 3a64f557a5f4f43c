import time, sys
from tests.process.storm.storm import Storm
from tests.process.storm.settings import StormSettings
from tests.process.storm import faults
if __name__ == "__main__":
    tr, mode, what = sys.argv[1:4]
    t=time.time()
    with Storm(StormSettings(transport=tr, mode=mode)) as s:
        s.publish()
        try:
            if what=="1":
                g=faults.stop_while_writing(s,"trainer 0"); s.restart_controller(); s.replace("trainer 0"); faults.go_on_when(s,g,"offered"); s.publish()
            if what=="4":
                faults.hear_late(s,["trainer 0","trainer 1"]); s.publish()
            if what=="5":
                faults.refuse_one(s,"engine 1")
            if what=="6":
                for _ in range(3):
                    faults.lose_writer(s,"trainer 0"); s.recover(); print(s.fleet.footprints())
            s.recover()
        finally:
            print("\n".join(map(str,s.fleet.journal)))
            print(tr,mode,what, round(time.time()-t,1)); print(*s.verdicts.findings,sep="\n")
