/* Runs the script of the search in an iframe where the site is opened from files, as browsers start
   no Worker there. The theme loads https://unpkg.com/iframe-worker for this, which needs a network.
*/
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inner = this.frame.contentWindow;
    this.receive = (event) => {
      if (event.source !== inner) return;
      const message = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(message);
      if (this.onmessage) this.onmessage(message);
    };
    addEventListener("message", this.receive);
    inner.document.open();
    inner.document.write("<!doctype html><html><body></body></html>");
    inner.document.close();
    // What the script expects of a worker's global scope.
    inner.postMessage = (data) =>
      dispatchEvent(new MessageEvent("message", { data, source: inner }));
    const load = (source) =>
      new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.src = source;
        script.onload = resolve;
        script.onerror = reject;
        inner.document.body.appendChild(script);
      });
    inner.importScripts = (...sources) =>
      sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
    this.ready = load(url);
  }

  postMessage(data) {
    const inner = this.frame.contentWindow;
    this.ready.then(() => inner.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    removeEventListener("message", this.receive);
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = IFrameWorker;
