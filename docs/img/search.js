// A query's words are parted as those of the pages are (separator in mkdocs.yml), so that
// mismatch/kl_k3 is found; lunr parts queries at blanks and hyphens alone.
addEventListener("DOMContentLoaded", () => {
  const post = searchWorker.postMessage.bind(searchWorker);
  searchWorker.postMessage = (message) =>
    post(message.query ? { query: message.query.replace(/[./_`]+/g, " ") } : message);
});
