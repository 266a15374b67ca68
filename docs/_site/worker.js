// The search of the site runs in a Worker, which browsers refuse to pages opened from disk. There, a hidden frame runs it.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => {
        const message = new MessageEvent("message", { data })
        this.dispatchEvent(message)
        this.onmessage?.(message)
      }
      const script = frame.contentDocument.createElement("script")
      script.src = url
      this.ready = new Promise(done => (script.onload = done))
      frame.contentDocument.body.append(script)
      this.frame = frame
    }
    postMessage(data) {
      const message = new MessageEvent("message", { data })
      this.ready.then(() => {
        this.frame.contentWindow.dispatchEvent(message)
        this.frame.contentWindow.onmessage?.(message)
      })
    }
    terminate() {
      this.frame.remove()
    }
  }
